"""AdamW on the device, in place, with the arithmetic of runtime/host_adamw.py: the same bits wherever an update runs.

    master   bits = (hi << 16) + lo; back: hi = (bits + 0x8000) >> 16, lo = bits - (hi << 16)
    x = g factor
    m = beta1 m + (1 - beta1) x
    v = beta2 v + (1 - beta2) (x x)
    w = decay w - rate (m / (sqrt(v) rbc2 + eps))

    hi  [n] bf16, the working weight    lo  [n] int16       m v  [n] fp32       g  [n] bf16 or fp32, the gradient
    or hi [n] fp32, the master itself, and no lo            factor  [1] fp32 on the device, the clip factor; NaN: no update
    step: beta1, 1 - beta1, beta2, 1 - beta2, eps, decay, rate, rbc2, each an fp32 number

Every operation is fp32 and rounded once: division and root are the exact ones, multiply and add are not fused.
26 bytes a parameter move. Source: Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, decay scaled by the learning rate.
"""
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.launch import check_rows


def adamw_ref(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, factor: float,
              step: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New w, m, v in plain torch, one operation after the other; exact to the bit in fp32, fp64 in, fp64 out."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, rate, rbc2 = step
    x = g.to(w.dtype) * factor
    m = beta1 * m + one_minus_beta1 * x
    v = beta2 * v + one_minus_beta2 * (x * x)
    # torch's fp32 root on a CPU is not the nearest number; fp64's, rounded, is
    root = v.double().sqrt().to(v.dtype)
    return decay * w - rate * (m / (root * rbc2 + eps)), m, v


@triton.jit
def _adamw(hi, lo, m, v, g, factor, n, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, rate, rbc2,
           BLOCK: tl.constexpr):
    # n passes 2^31 where an embedding of 152064 x 12288 is one range
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_factor = tl.load(factor)
    # NaN: the gradient is not finite, and nothing is to change
    inside = i < tl.where(b_factor == b_factor, n, 0)
    b_w = tl.load(hi + i, mask=inside, other=0)
    b_g = tl.load(g + i, mask=inside, other=0)
    b_m = tl.load(m + i, mask=inside, other=0.0)
    b_v = tl.load(v + i, mask=inside, other=0.0)
    if lo is not None:
        b_w = ((b_w.to(tl.int32) << 16) + tl.load(lo + i, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    # bf16 comes as its bits: widening is exact and needs no bf16 arithmetic
    if g.dtype.element_ty == tl.int16:
        b_g = (b_g.to(tl.int32) << 16).to(tl.float32, bitcast=True)

    b_x = b_g * b_factor
    b_m = beta1 * b_m + one_minus_beta1 * b_x
    b_v = beta2 * b_v + one_minus_beta2 * (b_x * b_x)
    b_w = decay * b_w - rate * tl.div_rn(b_m, tl.sqrt_rn(b_v) * rbc2 + eps)

    tl.store(m + i, b_m, mask=inside)
    tl.store(v + i, b_v, mask=inside)
    if lo is not None:
        b_bits = b_w.to(tl.int32, bitcast=True)
        tl.store(hi + i, ((b_bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(lo + i, b_bits.to(tl.int16), mask=inside)
    else:
        tl.store(hi + i, b_w, mask=inside)


# eight parameters a thread: 16-byte loads of hi, lo and g
BLOCK, NUM_WARPS = 1024, 4


def adamw(hi: torch.Tensor, lo: torch.Tensor | None, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, factor: torch.Tensor,
          step: Sequence[float]) -> None:
    """Updates hi, lo, m, v in place; see the top of the file for shapes. `step`: an AdamWStep of the host's.

    Raises ValueError, naming the tensor, for a shape, stride or dtype that does not fit.
    """
    n = hi.numel()
    check_rows("hi", hi, torch.float32 if lo is None else torch.bfloat16, n)
    if lo is not None:
        check_rows("lo", lo, torch.int16, n)
    check_rows("m", m, torch.float32, n)
    check_rows("v", v, torch.float32, n)
    check_rows("g", g, (torch.bfloat16, torch.float32), n)
    check_rows("factor", factor, torch.float32, 1)
    bits = [x.view(torch.int16) if x.dtype == torch.bfloat16 else x for x in (hi, g)]
    _adamw[triton.cdiv(n, BLOCK),](bits[0], lo, m, v, bits[1], factor, n, *map(float, step), BLOCK=BLOCK, num_warps=NUM_WARPS,
                                   enable_fp_fusion=False)
