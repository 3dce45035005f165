"""Sum of squares of an fp32 gradient, the count of what is not finite in it, and its rounded copy: one pass.

    out       = grad, rounded to nearest even
    result[0] = sum of grad^2 in fp64          result[1] = number of NaN and inf in out

    grad  [n] fp32        out  [n] bf16 or fp32        result  [2] fp64

Squares are taken in fp64: in fp32 those of 1e20 are inf. Program p adds the tiles p, p + P, p + 2P, ...; a second
kernel adds the P sums. P follows from n, and each order is fixed: the bits depend on n alone, not on the GPU.
The sum is NaN or inf where the gradient holds one. 6 bytes an element move (bf16 out).
"""
import torch
import triton
import triton.language as tl

from kernels.launch import check_partials, check_rows


def norm2_ref(grad: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Plain torch; fp64 [2]."""
    return torch.stack([grad.double().square().sum(), (~grad.to(out_dtype).isfinite()).sum().double()])


@triton.jit
def _norm2_partial(grad, out, partials, n, num_tiles, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    b_sum = tl.zeros([BLOCK], tl.float64)
    b_count = tl.zeros([BLOCK], tl.int32)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        # n passes 2^31 where an embedding of 152064 x 16384 is one gradient
        i = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_grad = tl.load(grad + i, mask=i < n, other=0.0)                      # [BLOCK]
        b_out = b_grad.to(out.dtype.element_ty)
        tl.store(out + i, b_out, mask=i < n)
        b_wide = b_grad.to(tl.float64)
        b_sum += b_wide * b_wide
        # an exponent of all ones; of the rounded gradient, which the update reads: 3.4e38 is finite in fp32, not in bf16
        b_count += ((b_out.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000).to(tl.int32)
    tl.store(partials + tl.program_id(0), tl.sum(b_sum, 0))
    tl.store(partials + tl.num_programs(0) + tl.program_id(0), tl.sum(b_count, 0).to(tl.float64))


@triton.jit
def _norm2_sum(partials, result, P, BP: tl.constexpr):
    p = tl.arange(0, BP)
    tl.store(result, tl.sum(tl.load(partials + p, mask=p < P, other=0.0), 0))
    tl.store(result + 1, tl.sum(tl.load(partials + P + p, mask=p < P, other=0.0), 0))


# programs at most, a power of two: four a multiprocessor of a large GPU, all at once
MAX_PROGRAMS = 512
# with the next two tiles on their way to shared memory, 64 KB a multiprocessor are in flight
BLOCK, NUM_WARPS, STAGES = 2048, 4, 3


def norm2_partials_shape() -> tuple[int]:
    """fp32 scratch that `norm2` needs: an fp64 sum and an fp64 count a program."""
    return (4 * MAX_PROGRAMS,)


def norm2(grad: torch.Tensor, *, out: torch.Tensor, partials: torch.Tensor, result: torch.Tensor) -> None:
    """Writes out [n] and result [2] fp64 = sum of squares of grad [n] fp32 before rounding, count of NaN and inf.

    partials: fp32 scratch, `norm2_partials_shape()` or more, at a multiple of 8 bytes. Raises ValueError, naming the
    tensor, on a wrong shape, stride, dtype or alignment.
    """
    n = grad.numel()
    check_rows("grad", grad, torch.float32, n)
    check_rows("out", out, (torch.bfloat16, torch.float32), n)
    check_rows("result", result, torch.float64, 2)
    check_partials(partials, *norm2_partials_shape())
    if partials.data_ptr() % 8:
        raise ValueError(f"partials: address {partials.data_ptr():#x} is not a multiple of 8 bytes")
    wide = partials.view(-1)[: 4 * MAX_PROGRAMS].view(torch.float64)
    # counted here: n + BLOCK - 1 passes 2^31 in the kernel where n, just below it, is an int32
    num_tiles = triton.cdiv(n, BLOCK)
    P = min(MAX_PROGRAMS, num_tiles)
    _norm2_partial[P,](grad, out, wide, n, num_tiles, BLOCK=BLOCK, STAGES=STAGES, num_warps=NUM_WARPS)
    _norm2_sum[1,](wide, result, P, BP=MAX_PROGRAMS, num_warps=4)
