"""The gates of the presets' MLPs, for tests.kernels.aot."""
import torch

from kernels.swiglu import swiglu

EXPECT = {"_swiglu_fwd": {"loads_16_bytes": 4, "stores_16_bytes": 2}}


def cases() -> None:
    for F in (1536, 12288, 13824, 14336, 18944, 27648, 28672, 29568, 32768):
        swiglu(torch.empty(3, 2 * F, dtype=torch.bfloat16), out=torch.empty(3, F, dtype=torch.bfloat16))
