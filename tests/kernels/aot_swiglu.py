"""The gates of the presets' MLPs, for tests.kernels.aot."""
import torch

from kernels.swiglu import swiglu
from tests.kernels.aot import H200

EXPECT = {"_swiglu_fwd": {"loads_16_bytes": 4, "stores_16_bytes": 2}}


def cases(target: str) -> None:
    for F in (13824, 1536, 12288, 14336, 18944, 27648, 28672, 29568, 32768) if target == H200 else (13824,):
        swiglu(torch.empty(3, 2 * F, dtype=torch.bfloat16), out=torch.empty(3, F, dtype=torch.bfloat16))
