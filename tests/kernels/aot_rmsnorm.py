"""The norms of the presets' layers, for tests.kernels.aot."""
import torch

from kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_partials_shape

EXPECT = {
    "_rmsnorm_fwd": {"loads_16_bytes": 4, "stores_16_bytes": 4},
    # rows come by cp.async and w once a program: what is left to look at are the stores
    "_rmsnorm_bwd": {"stores_16_bytes": 2},
    "_sum_partials": {"loads_16_bytes": 8},
}
W = 1 << 40


def cases() -> None:
    # under fp32 what counts is that the tiles on their way fit shared memory
    for dtype, widths in ((torch.bfloat16, (64, 128, 576, 3584, 4096, 5120, 8192, 12288)), (torch.float32, (576, 5120, 12288))):
        for D in widths:
            x, dy = torch.empty(2, 3, D, dtype=dtype)
            rstd, partials = torch.empty(3), torch.empty(rmsnorm_partials_shape(D))
            rmsnorm(x, W, 1e-6, out=dy, rstd=rstd)
            for residual, accumulate in ((None, False), (dy, True)):
                rmsnorm_backward(dy, x, W, rstd, residual, dx=dy, dw_addr=W, partials=partials, accumulate=accumulate)
