"""SwiGLU, forward: out = silu(gate) * up, silu(g) = g / (1 + exp(-g)).

    gate_up  [N, 2F] bf16, fp16 or fp32, contiguous: columns 0..F are gate, F..2F up
    out      [N, F], dtype of gate_up; fp32 inside

Its backward is the epilogue of the down projection's (kernels/gemm.py, linear_dgrad_swiglu).
Source: Shazeer 2020, arXiv 2002.05202.
"""
import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, check_rows


def swiglu_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch; fp64 in, fp64 out, so that it can judge the kernel."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


@triton.jit
def _swiglu_fwd(gate_up, out, F: tl.constexpr, BF: tl.constexpr):
    blocks: tl.constexpr = (F + BF - 1) // BF
    # N * 2F passes 2^31 at 32,768 rows of 65,536
    row = (tl.program_id(0) // blocks).to(tl.int64)
    f = (tl.program_id(0) % blocks) * BF + tl.arange(0, BF)
    inside = f < F
    b_gate = tl.load(gate_up + row * (2 * F) + f, mask=inside, other=0.0).to(tl.float32)       # [BF]
    b_up = tl.load(gate_up + row * (2 * F) + F + f, mask=inside, other=0.0).to(tl.float32)     # [BF]
    tl.store(out + row * F + f, (b_gate * tl.sigmoid(b_gate) * b_up).to(out.dtype.element_ty), mask=inside)


# columns of a tile: with 4 warps, two 16-byte loads of gate and of up a thread
TILE, WARPS = 2048, 4


def swiglu(gate_up: torch.Tensor, *, out: torch.Tensor) -> None:
    """Writes `out` [N, F] from `gate_up` [N, 2F], same dtype. Raises ValueError, naming the tensor, on a wrong shape, stride
    or dtype, and if F is not a multiple of 16."""
    N, F = out.shape[0], out.shape[-1]
    check_rows("out", out, DTYPES, N, F)
    check_rows("gate_up", gate_up, out.dtype, N, 2 * F)
    if F % 16:
        raise ValueError(f"out: {F} columns; wanted a multiple of 16")
    BF = min(triton.next_power_of_2(F), TILE)
    _swiglu_fwd[N * triton.cdiv(F, BF),](gate_up, out, F=F, BF=BF, num_warps=WARPS)
