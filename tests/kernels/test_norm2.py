"""norm2: right where fp32 squares overflow, counts what is not finite, rounds as torch does."""
import math

import pytest
import torch

from kernels.norm2 import BLOCK, MAX_PROGRAMS, norm2, norm2_partials_shape, norm2_ref


def run(grad: torch.Tensor, empty, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """(result fp64 [2], rounded copy)"""
    out, result = empty(grad.numel(), dtype=dtype), empty(2, dtype=torch.float64)
    norm2(grad, out=out, partials=empty(*norm2_partials_shape()), result=result)
    return result, out


# one element, a tile, one more, several tiles
@pytest.mark.parametrize("n", [1, BLOCK, BLOCK + 1, 20_011])
def test_the_sum_of_squares_is_fp64s_and_the_copy_is_exact(n, empty, device):
    grad = torch.randn(n, device=device) * 10 ** torch.empty(n, device=device).uniform_(-6, 3)
    result, out = run(grad, empty)
    # n additions in another order
    assert abs(result[0] / norm2_ref(grad, out.dtype)[0] - 1) <= n * torch.finfo(torch.float64).eps
    assert result[1] == 0 and torch.equal(out, grad)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("n", [100, pytest.param(100_000_003, marks=pytest.mark.gpu)])
def test_the_copy_is_rounded_as_torch_rounds(n, dtype, empty, device):
    grad = torch.randn(n, device=device)
    grad[:6] = torch.tensor([-0.0, 1e-45, 1.00390625, 1.01171875, 3.4e38, -1e-39])
    assert torch.equal(run(grad, empty, dtype)[1], grad.to(dtype))


@pytest.mark.gpu
def test_what_is_finite_in_fp32_and_not_in_bf16_is_counted(empty):
    grad = torch.tensor([1.0, 3.4e38, float("nan"), -2.0], device="cuda")
    assert run(grad, empty, torch.bfloat16)[0][1] == 2 and run(grad, empty)[0][1] == 1


def test_NUM2_four_gradients_of_1e20_have_a_norm_of_2e20(empty, device):
    grad = torch.full((4,), 1e20, device=device)
    result, _ = run(grad, empty)
    assert result[1] == 0 and math.sqrt(result[0]) == pytest.approx(2 * grad[0].item(), rel=torch.finfo(torch.float64).eps)


def test_OPT10_norms_worked_out_by_hand(empty, device):
    for values, norm in (([6.0, 8.0], 10.0), ([0.375, 0.5], 0.625)):
        assert run(torch.tensor(values, device=device), empty)[0].tolist() == [norm**2, 0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, BLOCK, 5000])
def test_OPT11_one_element_that_is_not_finite_is_counted_and_shows_in_the_sum(bad, at, empty, device):
    grad = torch.randn(5001, device=device)
    grad[at] = bad
    result, _ = run(grad, empty)
    assert result[1] == 1 and not math.isfinite(result[0])


def test_OPT11_all_zero_gives_zero_and_the_largest_number_is_finite(empty, device):
    assert run(torch.zeros(3000, device=device), empty)[0].tolist() == [0, 0]
    largest = torch.finfo(torch.float32).max
    assert run(torch.full((3,), -largest, device=device), empty)[0].tolist() == [3 * largest**2, 0]


def test_a_second_call_gives_the_same_bits(empty, device):
    grad = torch.randn(12_345, device=device)
    assert torch.equal(run(grad, empty)[0], run(grad, empty)[0])


@pytest.mark.gpu
def test_more_tiles_than_programs_are_all_counted(empty):
    n = 3 * MAX_PROGRAMS * BLOCK + 77
    result, out = run(torch.ones(n, device="cuda"), empty, torch.bfloat16)
    assert result.tolist() == [n, 0] and (out == 1).all()
