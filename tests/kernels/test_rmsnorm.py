"""RMSNorm and its backward against fp64, with F.rms_norm and its autograd as the peer."""
import pytest
import torch
import torch.nn.functional as F

from kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_partials_shape, rmsnorm_ref
from tests.judge import judge

EPS = 1e-6
# one row, odd, a whole tile of rows, one row more, a row wider than a tile of short ones
SHAPES = [(1, 64), (3, 128), (32, 128), (33, 128), (7, 192), (5, 576), (3, 5120)]
DTYPES = [torch.float32, torch.float16]
GPU_SHAPES = [(N, D) for N in (1, 127, 4099) for D in (576, 4096, 5120, 8192, 12288)]


def random(*shape, dtype, device):
    return torch.randn(*shape, device=device).to(dtype)


def forward(x, w, empty):
    out, rstd = empty(*x.shape, dtype=x.dtype), empty(x.shape[0])
    rmsnorm(x, w.data_ptr(), EPS, out=out, rstd=rstd)
    return out, rstd


def backward(dy, x, w, residual, empty, *, dx=None, dw=None):
    """dx and dw of the kernel; dw is what it was plus the gradient if one is given."""
    _, rstd = forward(x, w, empty)
    D = x.shape[1]
    dx = empty(*x.shape, dtype=x.dtype) if dx is None else dx
    accumulate, dw = dw is not None, empty(D) if dw is None else dw
    rmsnorm_backward(dy, x, w.data_ptr(), rstd, residual, dx=dx, dw_addr=dw.data_ptr(),
                     partials=empty(*rmsnorm_partials_shape(D)), accumulate=accumulate)
    return dx, dw


def autograd(dy, x, w, residual, norm):
    """The same two gradients through autograd of `norm`, in the dtype of what goes in."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    dx, dw = torch.autograd.grad(norm(x, w), (x, w), dy)
    return dx if residual is None else dx + residual, dw


def peer_norm(x, w):
    return F.rms_norm(x, w.shape, w, EPS)


def exact_norm(x, w):
    return rmsnorm_ref(x, w, EPS)


def check_forward(N, D, dtype, device, empty):
    x, w = random(N, D, dtype=dtype, device=device), random(D, dtype=dtype, device=device)
    out, rstd = forward(x, w, empty)
    judge(out, exact=exact_norm(x.double(), w.double()), peer=peer_norm(x, w))
    mean = x.double().square().mean(-1)
    judge(rstd, exact=(mean + EPS).rsqrt(), peer=(x.float().square().mean(-1) + EPS).rsqrt())


def check_backward(N, D, dtype, device, empty):
    dy, x, residual = random(3, N, D, dtype=dtype, device=device)
    w = random(D, dtype=dtype, device=device)
    dx, dw = backward(dy, x, w, residual, empty)
    exact_dx, exact_dw = autograd(dy.double(), x.double(), w.double(), residual.double(), exact_norm)
    peer_dx, _ = autograd(dy, x, w, residual, peer_norm)
    # dw is fp32 whatever x is
    _, peer_dw = autograd(dy.float(), x.float(), w.float(), None, peer_norm)
    judge(dx, exact=exact_dx, peer=peer_dx)
    judge(dw, exact=exact_dw, peer=peer_dw)


@pytest.mark.parametrize(("N", "D"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_is_as_exact_as_torch(N, D, dtype, device, empty):
    check_forward(N, D, dtype, device, empty)


@pytest.mark.parametrize(("N", "D"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_is_as_exact_as_torch(N, D, dtype, device, empty):
    check_backward(N, D, dtype, device, empty)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "D"), SHAPES + GPU_SHAPES)
def test_bf16_is_as_exact_as_torch(N, D, device, empty):
    check_forward(N, D, torch.bfloat16, device, empty)
    check_backward(N, D, torch.bfloat16, device, empty)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [5120, 12288])
def test_fp32_at_real_widths_fits_shared_memory(D, device, empty):
    check_forward(127, D, torch.float32, device, empty)
    check_backward(127, D, torch.float32, device, empty)


@pytest.mark.parametrize("alias", ["dy", "residual"])
def test_dx_may_be_written_over_what_backward_reads(alias, device, empty):
    tensors = dict(zip(("dy", "x", "residual"), random(3, 37, 192, dtype=torch.float32, device=device), strict=True))
    w = random(192, dtype=torch.float32, device=device)
    expected = backward(**tensors, w=w, empty=empty)
    got = backward(**tensors, w=w, empty=empty, dx=tensors[alias])
    assert all(map(torch.equal, got, expected))


def test_forward_may_be_written_over_x(device, empty):
    x, w = random(5, 192, dtype=torch.float32, device=device), random(192, dtype=torch.float32, device=device)
    expected, _ = forward(x, w, empty)
    rmsnorm(x, w.data_ptr(), EPS, out=x, rstd=empty(5))
    assert torch.equal(x, expected)


def test_without_residual_nothing_is_added(device, empty):
    dy, x = random(2, 5, 192, dtype=torch.float32, device=device)
    w = random(192, dtype=torch.float32, device=device)
    got = backward(dy, x, w, None, empty)
    assert all(map(torch.equal, got, backward(dy, x, w, torch.zeros_like(x), empty)))


def test_accumulating_adds_to_what_is_there(device, empty):
    dy, x, residual = random(3, 5, 192, dtype=torch.float32, device=device)
    w, before = random(2, 192, dtype=torch.float32, device=device)
    _, alone = backward(dy, x, w, residual, empty)
    _, added = backward(dy, x, w, residual, empty, dw=before.clone())
    assert torch.equal(added, before + alone)


def test_the_same_input_gives_the_same_bits(device, empty):
    dy, x, residual = random(3, 133, 128, dtype=torch.float16, device=device)
    w = random(128, dtype=torch.float16, device=device)
    first = backward(dy, x, w, residual, empty)
    assert all(map(torch.equal, backward(dy, x, w, residual, empty), first))
