"""kernels/gemm.py against fp64, with torch's own product in the same dtype as the bar."""
import pytest
import torch
import torch.nn.functional as F

import kernels.gemm as gemm
from kernels.gemm import (
    bias_grad_partials_shape,
    dgrad_swiglu_ref,
    linear,
    linear_bias_grad,
    linear_dgrad,
    linear_dgrad_swiglu,
    linear_ref,
    linear_swiglu,
    linear_wgrad,
)
from kernels.swiglu import swiglu_ref
from tests.judge import judge

# the interpreter's tile is 32 x 64 x 64: one row, one tile, one more row, odd rows of a real width
SHAPES = [(1, 64, 16), (32, 64, 64), (33, 80, 72), (35, 72, 576)]
# real layers: one row, less than a tile of rows, three rows more than whole tiles
GPU_SHAPES = [(1, 5120, 13824), (127, 13824, 5120), (127, 32000, 4096), (4099, 5120, 13824), (4099, 13824, 5120)]


def on_gpu(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


# bf16 is wrong in the interpreter
CASES = [(shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.float16)]
CASES += [on_gpu(shape, torch.bfloat16) for shape in SHAPES + GPU_SHAPES]
each_case = pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)


@pytest.fixture
def normal(device):
    """`normal(*shape, dtype=...)`: N(0, 1), the same numbers each time."""
    generator = torch.Generator(device).manual_seed(7)

    def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return make


@pytest.fixture(autouse=True)
def fresh_options():
    """Tests replace what options are made of."""
    gemm.launch_options.cache_clear()
    yield
    gemm.launch_options.cache_clear()


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same matrix with 16 columns of NaN between its rows."""
    wide = torch.full((x.shape[0], (x.shape[1] + 7) // 8 * 8 + 16), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def fp32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's a b kept in fp32: on the GPU from 16-bit operands, so that both sum as tensor cores do."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype != torch.float32 else a.float() @ b.float()


@each_case
@pytest.mark.parametrize("extras", ["", "bias", "residual", "bias residual"])
def test_linear_is_as_exact_as_torch(shape, dtype, extras, normal, empty):
    M, N, K = shape
    x, w, out = normal(M, K, dtype=dtype), normal(N, K, dtype=dtype), empty(M, N, dtype=dtype)
    bias = normal(N, dtype=dtype) if "bias" in extras else None
    residual = normal(M, N, dtype=dtype) if "residual" in extras else None
    linear(x, w.data_ptr(), out=out, bias_addr=0 if bias is None else bias.data_ptr(), residual=residual)
    exact = linear_ref(*(a if a is None else a.double() for a in (x, w, bias, residual)))
    judge(out, exact=exact, peer=linear_ref(x, w, bias, residual))


@each_case
def test_gate_and_up_with_swiglu_are_as_exact_as_torch(shape, dtype, normal, empty):
    M, F, K = shape[0], -(-shape[1] // 16) * 16, shape[2]
    x, w = normal(M, K, dtype=dtype), normal(2 * F, K, dtype=dtype) / K**0.5
    gate_up, act = empty(M, 2 * F, dtype=dtype), empty(M, F, dtype=dtype)
    linear_swiglu(x, w.data_ptr(), gate_up=gate_up, act=act)
    exact, peer = linear_ref(x.double(), w.double()), linear_ref(x, w)
    judge(gate_up, exact=exact, peer=peer)
    judge(act, exact=swiglu_ref(exact), peer=swiglu_ref(peer))


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "F"), [(5000, 1040), (129, 144)])
def test_a_tile_of_gate_and_up_that_overhangs_touches_neither(M, F, normal, empty):
    """Rows and columns that are no whole tiles: up begins where gate's last tile would go on, and NaN lies behind the end."""
    x, w = normal(M, 512, dtype=torch.bfloat16), normal(2 * F, 512, dtype=torch.bfloat16) / 512**0.5
    whole, more = empty(M + 64, 2 * F, dtype=x.dtype), empty(M + 64, F, dtype=x.dtype)
    linear_swiglu(x, w.data_ptr(), gate_up=whole[:M], act=more[:M])
    assert whole[M:].isnan().all() and more[M:].isnan().all()
    judge(whole[:M], exact=x.double() @ w.double().T, peer=linear_ref(x, w))


@each_case
def test_dgrad_is_as_exact_as_torch(shape, dtype, normal, empty):
    M, N, K = shape
    dy, w, out = normal(M, N, dtype=dtype), normal(N, K, dtype=dtype), empty(M, K, dtype=dtype)
    linear_dgrad(dy, w.data_ptr(), out=out)
    judge(out, exact=dy.double() @ w.double(), peer=dy @ w)


@each_case
@pytest.mark.parametrize("accumulate", [False, True])
def test_wgrad_is_as_exact_as_torch(shape, dtype, accumulate, normal, empty):
    M, N, K = shape
    dy, x = normal(M, N, dtype=dtype), normal(M, K, dtype=dtype)
    before = normal(N, K, dtype=torch.float32) if accumulate else torch.zeros(N, K, device=x.device)
    dw = before.clone() if accumulate else empty(N, K)
    linear_wgrad(dy, x, dw.data_ptr(), accumulate=accumulate)
    judge(dw, exact=before.double() + dy.double().T @ x.double(), peer=before + fp32_product(dy.T, x))


@each_case
@pytest.mark.parametrize("in_place", [False, True])
def test_dgrad_through_swiglu_is_as_exact_as_torch(shape, dtype, in_place, normal, empty):
    M, D, F = shape
    dy, w, gate_up = normal(M, D, dtype=dtype), normal(D, F, dtype=dtype) / D**0.5, normal(M, 2 * F, dtype=dtype)
    exact_d, exact_act = dgrad_swiglu_ref(dy.double(), w.double(), gate_up.double())
    peer_d, peer_act = dgrad_swiglu_ref(dy, w, gate_up)
    d_gate_up, act = gate_up if in_place else empty(M, 2 * F, dtype=dtype), empty(M, F, dtype=dtype)
    linear_dgrad_swiglu(dy, w.data_ptr(), gate_up, d_gate_up=d_gate_up, act=act)
    judge(d_gate_up, exact=exact_d, peer=peer_d)
    judge(act, exact=exact_act, peer=peer_act)


@each_case
@pytest.mark.parametrize("accumulate", [False, True])
def test_bias_grad_is_as_exact_as_torch(shape, dtype, accumulate, normal, empty):
    M, N, _ = shape
    dy = normal(M, N, dtype=dtype)
    before = normal(N, dtype=torch.float32) if accumulate else torch.zeros(N, device=dy.device)
    db = before.clone() if accumulate else empty(N)
    linear_bias_grad(dy, db.data_ptr(), partials=empty(*bias_grad_partials_shape(N)), accumulate=accumulate)
    judge(db, exact=before.double() + dy.double().sum(0), peer=before + dy.float().sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, on_gpu(torch.bfloat16)], ids=str)
def test_an_odd_vocabulary_fits_padded_rows(dtype, normal, empty):
    M, V, D = 35, 257, 64
    x, w = normal(M, D, dtype=dtype), normal(V, D, dtype=dtype)
    logits, dx, dw = padded(empty(M, V, dtype=dtype)), empty(M, D, dtype=dtype), empty(V, D)
    linear(padded(x), w.data_ptr(), out=logits)
    judge(logits, exact=x.double() @ w.double().T, peer=F.linear(x, w))
    # the TMA unit stores whole 16 bytes: 8 elements at most
    assert logits._base[:, -(-V // 8) * 8:].isnan().all(), "wrote past the columns of out"
    dy = padded(normal(M, V, dtype=dtype))
    linear_dgrad(dy, w.data_ptr(), out=dx)
    judge(dx, exact=dy.double() @ w.double(), peer=dy @ w)
    linear_wgrad(dy, padded(x), dw.data_ptr(), accumulate=False)
    # torch takes rows of 257 elements to other units than the tensor cores, whose sums are coarser
    peer = fp32_product(F.pad(dy, (0, 7)).T.contiguous(), x)[:V]
    judge(dw, exact=dy.double().T @ x.double(), peer=peer)


def test_three_programs_share_many_tiles(monkeypatch, normal, empty):
    # 10 x 2 tiles: more than one group of rows, and the last group is not whole
    M, N, K = 300, 104, 72
    monkeypatch.setattr(gemm, "num_sms", lambda: 3)
    x, w, out = normal(M, K, dtype=torch.float16), normal(N, K, dtype=torch.float16), empty(M, N, dtype=torch.float16)
    linear(x, w.data_ptr(), out=out)
    judge(out, exact=x.double() @ w.double().T, peer=F.linear(x, w))


@pytest.mark.parametrize(("sms", "rows", "cols", "BN"), [(132, 16384, 5120, 256), (132, 4096, 5120, 256), (132, 512, 2048, 128)])
def test_few_tiles_are_cut_smaller(monkeypatch, sms, rows, cols, BN):
    monkeypatch.setattr(gemm, "num_sms", lambda: sms)
    monkeypatch.setattr(gemm, "candidate_tiles", lambda op, dtype: gemm.HOPPER_TILES[op])
    assert gemm.choose_tile("linear", torch.bfloat16, rows, cols).BN == BN


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(127, 5120, 13824), (4099, 7168, 5120)], ids=str)
def test_the_same_bits_come_out_twice(shape, normal, empty):
    M, N, K = shape
    x, w, dy = normal(M, K, dtype=torch.bfloat16), normal(N, K, dtype=torch.bfloat16), normal(M, N, dtype=torch.bfloat16)

    def once() -> list[torch.Tensor]:
        out, dx, act = empty(M, N, dtype=x.dtype), empty(M, K, dtype=x.dtype), empty(M, K, dtype=x.dtype)
        dw, db, d_gate_up = empty(N, K), empty(N), torch.cat((x, x), dim=1)
        half = empty(M, N // 2, dtype=x.dtype)
        linear_swiglu(x, w.data_ptr(), gate_up=out, act=half)
        both = out.clone()
        linear(x, w.data_ptr(), out=out, residual=dy)
        linear_dgrad(dy, w.data_ptr(), out=dx)
        linear_wgrad(dy, x, dw.data_ptr(), accumulate=False)
        linear_dgrad_swiglu(dy, w.data_ptr(), d_gate_up, d_gate_up=d_gate_up, act=act)
        linear_bias_grad(dy, db.data_ptr(), partials=empty(*bias_grad_partials_shape(N)), accumulate=False)
        return [both, half, out, dx, dw, d_gate_up, act, db]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))
