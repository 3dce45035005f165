"""Linear cross-entropy in chunks: as exact as torch's, whatever the chunk, the vocabulary and the mask."""
import math

import pytest
import torch
import torch.nn.functional as F

from kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from tests.judge import judge


def inputs(N, D, V, dtype, device, masked=0.25):
    """x [N, D], W [V, D], labels [N] with masked ones."""
    x, w = torch.randn(N, D, device=device).to(dtype), (torch.randn(V, D, device=device) * 2 / math.sqrt(D)).to(dtype)
    labels = torch.randint(V, (N,), device=device, dtype=torch.int32)
    labels[torch.rand(N, device=device) < masked] = -100
    labels[0], labels[-1] = 0, V - 1
    return x, w, labels


def run(x, w, labels, scale, empty, chunk, gradient=True, dw=None):
    """(losses, dx, dW); logits and outputs start as NaN, dW too where none is given."""
    (N, D), V = x.shape, w.shape[0]
    logits, losses = empty(chunk, -(-V // 8) * 8, dtype=x.dtype), empty(N)
    if not gradient:
        linear_cross_entropy(x, w.data_ptr(), labels, scale, V=V, logits=logits, losses=losses)
        return losses
    dx, accumulate = empty(N, D, dtype=x.dtype), dw is not None
    dw = empty(V, D) if dw is None else dw
    linear_cross_entropy(x, w.data_ptr(), labels, scale, V=V, logits=logits, losses=losses, dx=dx, dw_addr=dw.data_ptr(),
                         accumulate=accumulate)
    return losses, dx, dw


def autograd(loss, x, w, labels, scale):
    """(losses, dx, dW) of loss(x, w, labels) [N]."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    losses = loss(x, w, labels)
    (losses.sum() * scale).backward()
    return losses.detach(), x.grad, w.grad


def torch_loss(x, w, labels):
    return F.cross_entropy(F.linear(x, w).float(), labels.long(), ignore_index=-100, reduction="none")


def check(N, D, V, dtype, device, empty, chunk):
    draws = []
    # a few numbers are no measure of torch's error: one row is judged over eight draws
    for _ in range(-(-8 // N)):
        x, w, labels = inputs(N, D, V, dtype, device)
        scale = 1 / int((labels >= 0).sum())
        ours = run(x, w, labels, scale, empty, chunk)
        assert (ours[0][labels < 0] == 0).all() and (ours[1][labels < 0] == 0).all()
        exact = autograd(linear_cross_entropy_ref, x.double(), w.double(), labels, scale)
        draws.append((ours, exact, autograd(torch_loss, x, w, labels, scale)))
    for which in range(3):
        got, exact, peer = (torch.cat([draw[kind][which] for draw in draws]) for kind in range(3))
        judge(got, exact=exact, peer=peer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "D", "V", "chunk"), [(1, 64, 257, 8), (5, 32, 1061, 3), (40, 64, 256, 33)])
def test_losses_and_gradients_are_as_exact_as_torchs(N, D, V, chunk, dtype, device, empty):
    check(N, D, V, dtype, device, empty, chunk)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "D", "V", "chunk"), [(513, 5120, 152064, 200), (257, 576, 49152, 257), (100, 4096, 32000, 64),
                                                    (33, 576, 257, 16)])
def test_bf16_losses_and_gradients_are_as_exact_as_torchs(N, D, V, chunk, empty):
    check(N, D, V, torch.bfloat16, "cuda", empty, chunk)


def test_LOSS6_chunks_change_no_loss_and_no_gradient(device, empty):
    T = 11
    x, w, labels = inputs(T, 32, 129, torch.float32, device)
    whole = run(x, w, labels, 1 / T, empty, T)
    for chunk in (1, 4, T + 904):
        for got, want in zip(run(x, w, labels, 1 / T, empty, chunk), whole, strict=True):
            assert (got - want).norm() <= 1e-6 * want.norm()


def test_LOSS6_labels_at_the_edges_of_chunks_count_once(device, empty):
    T, chunk, edges = 47, 10, [9, 10, 39, 40, 46]
    x, w, labels = inputs(T, 32, 129, torch.float32, device)
    labels[:] = -100
    labels[edges] = torch.tensor([7, 7, 7, 8, 9], dtype=torch.int32, device=device)
    losses, dx, dw = run(x, w, labels, 1.0, empty, chunk)
    assert losses.nonzero().flatten().tolist() == dx.any(1).nonzero().flatten().tolist() == edges
    alone = run(x[edges], w, labels[edges], 1.0, empty, len(edges))
    for got, want in zip((losses[edges], dx[edges], dw), alone, strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()


REAL = {"N": 4096, "D": 256, "V": 152064}


@pytest.mark.gpu
def test_gpu_LOSS6_chunks_are_as_exact_as_torch_at_the_real_vocabulary(empty):
    judge_chunks(**REAL, dtype=torch.bfloat16, chunks=(1, 100, 4096, 5000), device="cuda", empty=empty)


@pytest.mark.gpu
def test_gpu_LOSS6_chunks_make_no_difference_in_fp32_at_the_real_vocabulary(empty):
    """The case's own bound. torch's fp32 products sum 152,064 terms in several parts and ours in one, which bf16 never shows."""
    x, w, labels = inputs(**REAL, dtype=torch.float32, device="cuda")
    scale = 1 / int((labels >= 0).sum())
    whole = run(x, w, labels, scale, empty, REAL["N"])
    for chunk in (100, 5000):
        for got, want in zip(run(x, w, labels, scale, empty, chunk), whole, strict=True):
            assert (got - want).norm() <= 1e-6 * want.norm()


def test_LOSS6_chunks_are_as_exact_as_torch(device, empty):
    judge_chunks(40, 32, 136, torch.float32, (11, 50), device, empty)


def judge_chunks(N, D, V, dtype, chunks, device, empty):
    """Every chunk against one fp64 result; losses and dx, whose sums no chunk cuts, are the same to 1e-6 in fp32."""
    x, w, labels = inputs(N, D, V, dtype, device)
    scale = 1 / int((labels >= 0).sum())
    exact = autograd(linear_cross_entropy_ref, x.double(), w.double(), labels, scale)
    peer = autograd(torch_loss, x, w, labels, scale)
    whole = run(x, w, labels, scale, empty, N)
    for chunk in chunks:
        ours = run(x, w, labels, scale, empty, chunk)
        for each in zip(ours, exact, peer, strict=True):
            judge(each[0], exact=each[1], peer=each[2])
        if dtype == torch.float32:
            assert all((got - want).norm() <= 1e-6 * want.norm() for got, want in zip(ours[:2], whole[:2], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 100, 4096, 5000])
def test_gpu_LOSS6_one_chunk_of_logits_is_all_the_memory_that_it_takes(chunk, empty):
    N, D, V = REAL.values()
    x, w, labels = inputs(N, D, V, torch.bfloat16, "cuda")
    losses, dx, dw = empty(N), empty(N, D, dtype=x.dtype), empty(V, D)
    # torch frees nothing of this in between: what is there now stays
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = empty(chunk, V, dtype=x.dtype)
    # a few rows more than a chunk: the second one is alive too, if any is
    rows = min(N, 2 * chunk + 1)
    linear_cross_entropy(x[:rows], w.data_ptr(), labels[:rows], 1.0, V=V, logits=logits, losses=losses[:rows], dx=dx[:rows],
                         dw_addr=dw.data_ptr())
    # beside it there is only what descriptors need: far less than another chunk
    assert torch.cuda.max_memory_allocated() - before < 2 * logits.nbytes


def test_losses_alone_are_the_losses_with_gradients(device, empty):
    x, w, labels = inputs(9, 64, 300, torch.float32, device)
    assert torch.equal(run(x, w, labels, 1.0, empty, 4, gradient=False), run(x, w, labels, 1.0, empty, 4)[0])


def test_the_matrix_gradient_is_added_to_where_asked(device, empty):
    x, w, labels = inputs(9, 64, 300, torch.float32, device)
    alone, before = run(x, w, labels, 1.0, empty, 9)[2], torch.randn(300, 64, device=device)
    # one rounding of the sum, as torch rounds it
    assert torch.equal(run(x, w, labels, 1.0, empty, 9, dw=before.clone())[2], before + alone)


def test_LOSS9_inputs_are_not_written_to_and_a_second_call_gives_the_same_bits(device, empty):
    x, w, labels = inputs(9, 64, 300, torch.float32, device)
    copies = x.clone(), w.clone(), labels.clone()
    first = run(x, w, labels, 0.05, empty, 5)
    assert all(map(torch.equal, run(x, w, labels, 0.05, empty, 5), first))
    assert all(map(torch.equal, (x, w, labels), copies))


def test_a_chunk_of_masked_rows_has_no_gradient_even_where_logits_are_nan(device, empty):
    x, w, labels = inputs(6, 64, 300, torch.float32, device)
    labels[:] = -100
    x[2] = float("nan")
    losses, dx, _ = run(x, w, labels, 1.0, empty, 3)
    assert not losses.any() and not dx.any()


def test_logits_far_from_zero_neither_overflow_nor_lose_the_loss(device, empty):
    x, w = torch.zeros(2, 64, device=device), torch.zeros(300, 64, device=device)
    x[:, 0], w[:, 0], w[7, 0] = 1.0, 1e4, 1e4 + 1
    labels = torch.tensor([7, 8], dtype=torch.int32, device=device)
    exact = linear_cross_entropy_ref(x.double(), w.double(), labels)
    judge(run(x, w, labels, 1.0, empty, 2)[0], exact=exact, peer=exact.float())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_logit_that_is_not_finite_makes_its_loss_so_and_no_other(device, empty):
    x, w, labels = inputs(4, 64, 300, torch.float32, device, masked=0)
    for bad in (float("nan"), float("inf")):
        x[1] = bad
        losses = run(x, w, labels, 1.0, empty, 4, gradient=False)
        assert losses.isfinite().tolist() == [True, False, True, True]
