"""Attention at the head layouts of the presets, for tests.kernels.aot."""
import torch

from kernels.attention import attention, attention_backward
from tests.kernels.aot import H200

EXPECT = {
    "_attention_fwd": {"wgmma": 2, "tma_loads": 3},
    "_attention_dkv_bwd": {"wgmma": 4, "tma_loads": 4},
    "_attention_dq_bwd": {"wgmma": 3, "tma_loads": 4},
    "_delta_bwd": {"loads_16_bytes": 2},
}


def cases(target: str) -> None:
    """Heads of the presets (groups of 3, 5, 7 and 12); numbers of rows that the launcher finds divisible by 16, and others."""
    # without 256: dK and dV spill 16 bytes beside their loops there on triton 3.9, none on 3.6
    both = ((40, 8, 128, 256), (9, 3, 64, 256))
    for H, K, Dh, N in (*both, (40, 8, 128, 250), (28, 4, 128, 256), (96, 8, 128, 256)) if target == H200 else both:
        qkv, out = (torch.empty(N, heads * Dh, dtype=torch.bfloat16) for heads in (H + 2 * K, H))
        lse = torch.empty(H, N)
        doc_start = torch.empty(N, dtype=torch.int32)
        attention(qkv, doc_start, doc_start, H, K, Dh, Dh**-0.5, out=out, lse=lse)
        attention_backward(qkv, out, lse, out, doc_start, doc_start, H, K, Dh, Dh**-0.5, delta=lse, dqkv=qkv)
