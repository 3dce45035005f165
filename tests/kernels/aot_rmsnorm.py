"""The norms of the presets' layers, for tests.kernels.aot."""
import torch

from kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_partials_shape
from tests.kernels.aot import H200

EXPECT = {
    "_rmsnorm_fwd": {"loads_16_bytes": 4, "stores_16_bytes": 4},
    # rows come by cp.async and w once a program: what is left to look at are the stores
    "_rmsnorm_bwd": {"stores_16_bytes": 2},
    "_sum_partials": {"loads_16_bytes": 8},
}
W = 1 << 40


def cases(target: str) -> None:
    # rows over 8192 in fp32, which no run has, spill
    bf16_widths = (64, 128, 576, 3584, 4096, 5120, 8192, 12288) if target == H200 else (128, 4096, 12288)
    for dtype, widths in ((torch.bfloat16, bf16_widths), (torch.float32, (576, 5120))):
        for D in widths:
            x, dy = torch.empty(2, 3, D, dtype=dtype)
            rstd, partials = torch.empty(3), torch.empty(rmsnorm_partials_shape(D))
            rmsnorm(x, W, 1e-6, out=dy, rstd=rstd)
            for residual, accumulate in ((None, False), (dy, True)):
                rmsnorm_backward(dy, x, W, rstd, residual, dx=dy, dw_addr=W, partials=partials, accumulate=accumulate)
