"""Attention at the head layouts of the presets, for tests.kernels.aot."""
import torch

from kernels.attention import attention, attention_backward

EXPECT = {
    "_attention_fwd": {"wgmma": 2, "tma_loads": 3},
    "_attention_dkv_bwd": {"wgmma": 4, "tma_loads": 4},
    "_attention_dq_bwd": {"wgmma": 3, "tma_loads": 4},
    "_delta_bwd": {"loads_16_bytes": 2},
}


def cases() -> None:
    """Groups of 5 and 8 query heads; rows that the launcher finds divisible by 16, and others."""
    for H, K, Dh in ((40, 8, 128), (64, 8, 128), (40, 8, 64), (64, 8, 64)):
        for N in (256, 250):
            qkv, out = (torch.empty(N, heads * Dh, dtype=torch.bfloat16) for heads in (H + 2 * K, H))
            lse = torch.empty(H, N)
            doc_start = torch.empty(N, dtype=torch.int32)
            attention(qkv, doc_start, doc_start, H, K, Dh, Dh**-0.5, out=out, lse=lse)
            attention_backward(qkv, out, lse, out, doc_start, doc_start, H, K, Dh, Dh**-0.5, delta=lse, dqkv=qkv)
