"""POS6: every kernel where an offset, in bytes or in elements, passes 2^31; its code runs with a small border in the interpreter.

A row far from the start has the same bits as when it is one of few. Sums over rows get zeros from all rows but those.
"""
import pytest
import torch

from kernels.adamw import adamw
from kernels.attention import attention, attention_backward
from kernels.cross_entropy import linear_cross_entropy
from kernels.embedding import embedding, embedding_backward, embedding_partials_shape
from kernels.gemm import bias_grad_partials_shape, linear, linear_bias_grad, linear_dgrad, linear_dgrad_swiglu, linear_wgrad
from kernels.norm2 import norm2, norm2_partials_shape
from kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_partials_shape
from kernels.rope import rope, rope_backward, rope_partials_shape
from kernels.swiglu import swiglu
from runtime.host_adamw import adamw_step
from tests.kernels.long_offsets import TILE, Guarded, borders, normal, rows_around, rows_past, zero_but

EPS = 1e-6
FAR = 1 << 31


@pytest.fixture
def guarded(device):
    yield Guarded(device)
    # tests of other processes need the memory
    if device == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture
def dtype(border):
    """bf16 on the GPU; it is wrong in the interpreter."""
    return torch.bfloat16 if border == FAR else torch.float32


def sizes(names: str, *cases: tuple, near: tuple):
    """`cases` at the real border, on the GPU alone; `near`: border and sizes for the interpreter (and the GPU)."""
    return pytest.mark.parametrize(("border", *names.split()), [near, *(pytest.param(FAR, *c, marks=pytest.mark.gpu) for c in cases)])


def equal(far: torch.Tensor, rows: torch.Tensor, alone: torch.Tensor) -> bool:
    assert alone.isfinite().all()
    return torch.equal(far[rows], alone)


@sizes("V D", (152064, 64), (128256, 64), near=(1 << 13, 80, 32))
def test_POS6_logits_and_their_gradients(border, V, D, dtype, device, guarded, empty):
    N = rows_past(border, V)
    rows = rows_around(N, *borders(border, V, dtype)).to(device)
    x, w = normal(N, D, dtype=dtype, device=device), normal(V, D, dtype=dtype, device=device)
    # masked rows have no gradient: dW is that of the rows around the border
    labels = torch.full((N,), -100, dtype=torch.int32, device=device)
    labels[rows] = torch.randint(V, rows.shape, dtype=torch.int32, device=device)

    def run(x, labels, make):
        n = x.shape[0]
        logits, losses, dx, dw = make(n, V, dtype=dtype), make(n), make(n, D, dtype=dtype), make(V, D)
        linear_cross_entropy(x, w.data_ptr(), labels, 1.0, V=V, logits=logits, losses=losses, dx=dx, dw_addr=dw.data_ptr())
        return logits, losses, dx, dw

    *far, far_dw = run(x, labels, guarded)
    *alone, dw = run(x[rows], labels[rows], empty)
    assert all(equal(a, rows, b) for a, b in zip(far, alone, strict=True))
    assert torch.equal(far_dw, dw)
    assert (far[2].count_nonzero(1) > 0).sum() == rows.numel()
    guarded.check()


@sizes("F D", (18944, 64), near=(1 << 13, 80, 32))
def test_POS6_products_with_the_mlps_width_out(border, F, D, dtype, device, guarded, empty):
    N = rows_past(border, F)
    rows = rows_around(N, *borders(border, F, dtype)).to(device)
    x, residual = normal(N, D, dtype=dtype, device=device), normal(N, F, dtype=dtype, device=device)
    w, w_down = normal(F, D, dtype=dtype, device=device), normal(D, F, dtype=dtype, device=device)
    out, alone = guarded(N, F, dtype=dtype), empty(rows.numel(), F, dtype=dtype)
    linear(x, w.data_ptr(), out=out, residual=residual)
    linear(x[rows], w.data_ptr(), out=alone, residual=residual[rows])
    assert equal(out, rows, alone)
    linear_dgrad(x, w_down.data_ptr(), out=out)
    linear_dgrad(x[rows], w_down.data_ptr(), out=alone)
    assert equal(out, rows, alone)
    guarded.check()


@sizes("F D", (18944, 64), near=(1 << 13, 80, 32))
def test_POS6_products_with_the_mlps_width_in(border, F, D, dtype, device, guarded, empty):
    N = rows_past(border, F)
    rows = rows_around(N, *borders(border, F, dtype)).to(device)
    wide, x = normal(N, F, dtype=dtype, device=device), normal(N, D, dtype=dtype, device=device)
    w, w_down = normal(F, D, dtype=dtype, device=device), normal(D, F, dtype=dtype, device=device)
    for op, weight in ((linear, w_down), (linear_dgrad, w)):
        out, alone = guarded(N, D, dtype=dtype), empty(rows.numel(), D, dtype=dtype)
        op(wide, weight.data_ptr(), out=out)
        op(wide[rows], weight.data_ptr(), out=alone)
        assert equal(out, rows, alone)
    # as the gradient of an output, and as what was multiplied with it
    dx = zero_but(rows, x)
    for dy, other, shape in ((zero_but(rows, wide), x, (F, D)), (dx, wide, (D, F))):
        dw, alone = guarded(*shape), empty(*shape)
        linear_wgrad(dy, other, dw.data_ptr(), accumulate=False)
        linear_wgrad(dy[rows], other[rows], alone.data_ptr(), accumulate=False)
        assert torch.equal(dw, alone)
    guarded.check()


@sizes("F", (18944,), near=(1 << 13, 80))
def test_POS6_column_sums(border, F, dtype, device, guarded, empty):
    N = rows_past(border, F)
    rows = rows_around(N, *borders(border, F, dtype)).to(device)
    dy = torch.zeros(N, F, dtype=dtype, device=device)
    # whole numbers: their sum is exact in any order
    dy[rows] = torch.randint(-9, 10, (rows.numel(), F), device=device).to(dtype)
    db = guarded(F)
    linear_bias_grad(dy, db.data_ptr(), partials=empty(*bias_grad_partials_shape(F)), accumulate=False)
    assert torch.equal(db, dy[rows].float().sum(0))
    guarded.check()


@sizes("F", (18944,), near=(1 << 13, 80))
def test_POS6_swiglu(border, F, dtype, device, guarded, empty):
    N = rows_past(border, F)
    rows = rows_around(N, *borders(border, F, dtype), *borders(border, 2 * F, dtype)).to(device)
    gate_up = normal(N, 2 * F, dtype=dtype, device=device)
    out, alone = guarded(N, F, dtype=dtype), empty(rows.numel(), F, dtype=dtype)
    swiglu(gate_up, out=out)
    swiglu(gate_up[rows], out=alone)
    assert equal(out, rows, alone)
    guarded.check()


@sizes("F D", (18944, 64), near=(1 << 13, 80, 32))
def test_POS6_dgrad_through_swiglu(border, F, D, dtype, device, guarded, empty):
    N = rows_past(border, F)
    rows = rows_around(N, *borders(border, F, dtype), *borders(border, 2 * F, dtype)).to(device)
    gate_up, act = guarded(N, 2 * F, dtype=dtype).normal_(), guarded(N, F, dtype=dtype)
    dy, w = normal(N, D, dtype=dtype, device=device), normal(D, F, dtype=dtype, device=device)
    few, few_act = gate_up[rows], empty(rows.numel(), F, dtype=dtype)
    linear_dgrad_swiglu(dy, w.data_ptr(), gate_up, d_gate_up=gate_up, act=act)
    linear_dgrad_swiglu(dy[rows], w.data_ptr(), few, d_gate_up=few, act=few_act)
    assert equal(act, rows, few_act) and equal(gate_up, rows, few)
    guarded.check()


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@sizes("H K Dh", (28, 4, 128), (96, 8, 128), near=(1 << 10, 2, 1, 16))
def test_POS6_rope(border, H, K, Dh, norms, dtype, device, guarded, empty):
    cols = (H + 2 * K) * Dh
    N = rows_past(border, cols)
    rows = rows_around(N, *borders(border, cols, dtype)).to(device)
    qkv = normal(N, cols, dtype=dtype, device=device)
    angle = torch.arange(50.0, device=device)[:, None] * 10.0 ** -torch.arange(Dh // 2, device=device)
    positions = torch.randint(50, (N,), device=device, dtype=torch.int32)
    weights = normal(2, Dh, dtype=dtype, device=device)
    norm_addrs = {"q_norm_addr": weights[0].data_ptr(), "k_norm_addr": weights[1].data_ptr(), "eps": EPS} if norms else {}

    def run(qkv, positions, make):
        places = angle.cos(), angle.sin(), positions, H, K, Dh
        out = make(*qkv.shape, dtype=dtype)
        rope(qkv, *places, out=out, **norm_addrs)
        forward = out[rows] if len(out) == N else out.clone()
        grads = {}
        if norms:
            dw = empty(2, Dh)
            grads = {"dq_norm_addr": dw[0].data_ptr(), "dk_norm_addr": dw[1].data_ptr(), "partials": empty(*rope_partials_shape(Dh))}
        # the output of forward stands in for its gradient
        rope_backward(out, qkv, *places, **norm_addrs, **grads)
        return forward, out

    forward, backward = run(qkv, positions, guarded)
    few_forward, few_backward = run(qkv[rows], positions[rows], empty)
    assert torch.equal(forward, few_forward) and equal(backward, rows, few_backward)
    guarded.check()


# the second one's outputs pass the border too, not only its qkv
@sizes("H K Dh", (28, 4, 128), (40, 8, 128), (40, 8, 64), near=(1 << 11, 2, 1, 16))
def test_POS6_attention(border, H, K, Dh, dtype, device, guarded, empty):
    cols = (H + 2 * K) * Dh
    N = rows_past(border, H * Dh)
    rows = rows_around(N, *borders(border, cols, dtype), *borders(border, H * Dh, dtype)).to(device)
    qkv, dout = normal(N, cols, dtype=dtype, device=device), normal(N, H * Dh, dtype=dtype, device=device)
    # documents end with each tile, so that those around the border are whole
    lengths = torch.tensor([5, TILE // 2 - 5, 1, TILE // 2 - 1], device=device)
    ends = lengths.cumsum(0)

    def run(qkv, dout, make):
        n = qkv.shape[0]
        tiles = torch.arange(0, n, TILE, device=device)[:, None]
        documents = [(tiles + bound).flatten().repeat_interleave(lengths.repeat(n // TILE)).int() for bound in (ends - lengths, ends)]
        out, lse, dqkv = make(n, H * Dh, dtype=dtype), make(H, n), make(n, cols, dtype=dtype)
        attention(qkv, *documents, H, K, Dh, Dh ** -0.5, out=out, lse=lse)
        attention_backward(qkv, out, lse, dout, *documents, H, K, Dh, Dh ** -0.5, delta=empty(H, n), dqkv=dqkv)
        return out, lse.T, dqkv

    far, alone = run(qkv, dout, guarded), run(qkv[rows], dout[rows], empty)
    assert all(equal(a, rows, b) for a, b in zip(far, alone, strict=True))
    guarded.check()


@sizes("D", (5120,), (16384,), near=(1 << 13, 64))
def test_POS6_rmsnorm(border, D, dtype, device, guarded, empty):
    N = rows_past(border, D)
    rows = rows_around(N, *borders(border, D, dtype)).to(device)
    x, w = normal(N, D, dtype=dtype, device=device), normal(D, dtype=dtype, device=device)

    def run(x, make):
        out, rstd, dw = make(*x.shape, dtype=dtype), make(x.shape[0]), make(D)
        rmsnorm(x, w.data_ptr(), EPS, out=out, rstd=rstd)
        forward = out[rows] if len(out) == N else out.clone()
        # the output of forward stands in for its gradient
        rmsnorm_backward(out, x, w.data_ptr(), rstd, x, dx=out, dw_addr=dw.data_ptr(), partials=empty(*rmsnorm_partials_shape(D)),
                         accumulate=False)
        return forward, rstd, out

    forward, rstd, dx = run(x, guarded)
    few_forward, few_rstd, few_dx = run(x[rows], empty)
    assert torch.equal(forward, few_forward) and equal(rstd, rows, few_rstd) and equal(dx, rows, few_dx)
    guarded.check()


@sizes("D", (5120,), near=(1 << 13, 64))
def test_POS6_embedding_of_many_rows(border, D, dtype, device, guarded, empty):
    N = rows_past(border, D)
    rows = rows_around(N, *borders(border, D, dtype)).to(device)
    w, tokens = normal(7, D, dtype=dtype, device=device), torch.zeros(N, dtype=torch.int32, device=device)
    # whole tiles of one token: their chunks of rows are whole, whatever comes before
    tokens[rows] = 5
    out = guarded(N, D, dtype=dtype)
    embedding(tokens, w.data_ptr(), out=out)
    assert equal(out, rows, w[5].expand(rows.numel(), D))
    out.normal_()

    def gradient(dout, tokens, dw):
        embedding_backward(dout, tokens, torch.argsort(tokens, stable=True).int(), dw.data_ptr(),
                           partials=empty(*embedding_partials_shape(*dout.shape)))
        return dw[5]

    far, alone = gradient(out, tokens, guarded(7, D).zero_()), gradient(out[rows], tokens[rows], torch.zeros(7, D, device=device))
    assert alone.isfinite().all() and torch.equal(far, alone)
    guarded.check()


@sizes("D", (16384,), near=(1 << 13, 64))
def test_POS6_embedding_of_many_tokens(border, D, dtype, device, guarded, empty):
    V = rows_past(border, D)
    tokens = rows_around(V, *borders(border, D, dtype), *borders(border, D, torch.float32)).int().to(device)
    w, out = normal(V, D, dtype=dtype, device=device), empty(tokens.numel(), D, dtype=dtype)
    embedding(tokens, w.data_ptr(), out=out)
    assert torch.equal(out, w[tokens.long()])
    del w
    dw = guarded(V, D).zero_()
    embedding_backward(out, tokens, torch.arange(tokens.numel(), dtype=torch.int32, device=device), dw.data_ptr(),
                       partials=empty(*embedding_partials_shape(*out.shape)))
    assert torch.equal(dw[tokens.long()], out.float())
    assert (dw.count_nonzero(1) > 0).sum() == tokens.numel()
    guarded.check()


def elements_around(n: int, border: int, device: str) -> torch.Tensor:
    """Numbers of elements of [n] around the places where a byte or element offset is `border`, and the last ones."""
    middles = [at for at in (border // 4, border // 2, border) if at < n]
    return torch.cat([torch.arange(max(at - 700, 0), min(at + 700, n)) for at in (*middles, n - 700)]).unique().to(device)


# one layer of `120b`; where n + 2047 passes 2^31 and n does not; where n passes it
@sizes("n", (1_535_115_264,), (FAR - 1,), (FAR + 2049,), near=(8192, 8192 + 2049))
def test_POS6_norm2(border, n, dtype, device, guarded, empty):
    near = elements_around(n, border, device)
    grad = torch.ones(n, device=device)
    # whole numbers: the sum of their squares is exact in any order
    grad[near] = torch.randint(-1000, 1001, near.shape, device=device).float()
    out, result = guarded(n, dtype=dtype), guarded(2, dtype=torch.float64)
    partials = empty(*norm2_partials_shape())
    norm2(grad, out=out, partials=partials, result=result)
    assert torch.equal(out[near], grad[near].to(dtype))
    assert result.tolist() == [n - near.numel() + grad[near].double().square().sum().item(), 0]
    guarded.check()
    grad[near[0]], grad[-1] = float("nan"), float("inf")
    norm2(grad, out=out, partials=partials, result=result)
    assert result[1] == 2


@sizes("n is_split", (1_535_115_264, True), (FAR + 2049, False), near=(8192, 8192 + 2049, False))
def test_POS6_adamw(border, n, is_split, dtype, device, guarded):
    near = elements_around(n, border, device)
    hi, m = (guarded(n, dtype=d).normal_() for d in (torch.bfloat16 if is_split else torch.float32, torch.float32))
    v, g = guarded(n).uniform_(), normal(n, dtype=dtype, device=device)
    lo = guarded(n, dtype=torch.int16).random_(-1000, 1000) if is_split else None
    state, factor, step = (hi, lo, m, v), torch.full((1,), 0.5, device=device), adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 1)
    alone = [None if x is None else x[near] for x in state]
    before = [None if x is None else x.clone() for x in alone]
    adamw(*state, g, factor, step)
    adamw(*alone, g[near], factor, step)
    for far, few, old in zip(state, alone, before, strict=True):
        assert far is None or (torch.equal(far[near], few) and not torch.equal(few, old))
    guarded.check()
