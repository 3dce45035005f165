"""The norm of one layer's gradient, for tests.kernels.aot."""
import torch

from kernels.norm2 import norm2, norm2_partials_shape

# the gradient comes by cp.async, 16 bytes a thread
EXPECT = {"_norm2_partial": {"stores_16_bytes": 2}}


def cases(target: str) -> None:
    grad, partials = torch.empty(1 << 20), torch.empty(norm2_partials_shape())
    for dtype in (torch.bfloat16, torch.float32):
        norm2(grad, out=torch.empty(1 << 20, dtype=dtype), partials=partials, result=torch.empty(2, dtype=torch.float64))
