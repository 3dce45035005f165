"""The matrix products of the presets' layers, for tests.kernels.aot."""
import torch

from kernels.gemm import (
    bias_grad_partials_shape,
    linear,
    linear_bias_grad,
    linear_dgrad,
    linear_dgrad_swiglu,
    linear_swiglu,
    linear_wgrad,
)
from tests.kernels.aot import H200

EXPECT = {
    "_linear_fwd": {"wgmma": 1, "tma_loads": 2, "tma_stores": 1},
    "_linear_dgrad_bwd": {"wgmma": 1, "tma_loads": 2, "tma_stores": 1},
    "_linear_wgrad_bwd": {"wgmma": 1, "tma_loads": 2, "tma_stores": 1},
    "_linear_dgrad_swiglu_bwd": {"wgmma": 1, "tma_loads": 4, "tma_stores": 3},
    "_linear_swiglu_fwd": {"wgmma": 1, "tma_loads": 4, "tma_stores": 3},
    "_bias_grad_partial_bwd": {"loads_16_bytes": 1},
}
# nothing is read: any aligned address will do
W = 1 << 40


def rows(num_rows: int, cols: int) -> torch.Tensor:
    return torch.empty(num_rows, cols, dtype=torch.bfloat16)


def cases(target: str) -> None:
    """Each op at shapes that take the large tile (one whole wave of it) and at shapes that take the small one."""
    large, small, odd = (2048, 2048, 64), (257, 576, 1536), (1, 64, 2048)
    for M, N, K in (large, small, odd) if target == H200 else (large,):
        x, out = rows(M, K), rows(M, N)
        linear(x, W, out=out)
        linear(x, W, out=out, bias_addr=W)
        linear(x, W, out=out, residual=rows(M, N))
        linear_dgrad(out, W, out=x)
        for accumulate in (False, True):
            linear_wgrad(out, x, W, accumulate=accumulate)
    # an odd vocabulary has padded rows
    for M, V, D in ((64, 32000, 4096), (64, 257, 576)) if target == H200 else ():
        x, logits = rows(M, D), rows(M, (V + 7) // 8 * 8)[:, :V]
        linear(x, W, out=logits)
        linear_dgrad(logits, W, out=x)
        linear_wgrad(logits, x, W, accumulate=True)
    for M, D, F in ((2048, 64, 2048), (257, 576, 1536)) if target == H200 else ((2048, 64, 2048),):
        linear_dgrad_swiglu(rows(M, D), W, rows(M, 2 * F), d_gate_up=rows(M, 2 * F), act=rows(M, F))
    linear_swiglu(rows(257, 5120), W, gate_up=rows(257, 2 * 13824), act=rows(257, 13824))
    for accumulate in (False, True):
        linear_bias_grad(rows(100, 7168), W, partials=torch.empty(bias_grad_partials_shape(7168)), accumulate=accumulate)
