"""SwiGLU against fp64, with F.silu(gate) * up as the peer."""
import pytest
import torch
import torch.nn.functional as F

from kernels.swiglu import swiglu, swiglu_ref
from tests.judge import judge

# one row, odd, one tile, one more than a tile, a width with a last tile that is not full
SHAPES = [(1, 16), (3, 64), (5, 144), (2, 2048), (3, 2064), (3, 13824)]
GPU_SHAPES = [(N, F) for N in (1, 127, 4099) for F in (1536, 13824, 14336, 32768)]


def check(N, width, dtype, device, empty):
    gate_up = (torch.randn(N, 2 * width, device=device) * 4).to(dtype)
    out = empty(N, width, dtype=dtype)
    swiglu(gate_up, out=out)
    gate, up = gate_up.chunk(2, -1)
    judge(out, exact=swiglu_ref(gate_up.double()), peer=F.silu(gate) * up)


@pytest.mark.parametrize(("N", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_swiglu_is_as_exact_as_torch(N, width, dtype, device, empty):
    check(N, width, dtype, device, empty)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "width"), SHAPES + GPU_SHAPES)
def test_bf16_is_as_exact_as_torch(N, width, device, empty):
    check(N, width, torch.bfloat16, device, empty)


def test_gates_whose_exponential_overflows_give_zero_or_themselves(device, empty):
    gate_up = torch.ones(2, 32, device=device)
    gate_up[0, :16], gate_up[1, :16] = -200.0, 200.0
    out = empty(2, 16)
    swiglu(gate_up, out=out)
    assert torch.equal(out, torch.tensor([0.0, 200.0], device=device)[:, None].expand(2, 16))


def test_nan_and_inf_show_in_their_place_alone(device, empty):
    gate_up = torch.ones(1, 32, device=device)
    gate_up[0, 1], gate_up[0, 2], gate_up[0, 16 + 3] = float("nan"), float("inf"), float("nan")
    out = empty(1, 16)
    swiglu(gate_up, out=out)
    assert out[0].isfinite().tolist() == [True, False, False, False] + [True] * 12
