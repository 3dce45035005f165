"""AdamW over one layer's flat range, for tests.kernels.aot."""
import torch

from kernels.adamw import adamw

EXPECT = {"_adamw": {"loads_16_bytes": 5, "stores_16_bytes": 4}}
STEP = (0.9, 0.1, 0.95, 0.05, 1e-8, 0.9999, 1e-3, 2.0)


def cases(target: str) -> None:
    n = 1 << 20
    m, v, w, lo = torch.empty(n), torch.empty(n), torch.empty(n), torch.empty(n, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float32):
        g = torch.empty(n, dtype=dtype)
        adamw(torch.empty(n, dtype=torch.bfloat16), lo, m, v, g, torch.ones(1), STEP)
        adamw(w, None, m, v, g, torch.ones(1), STEP)
