"""Rotations of the presets' heads, in place and (with norms) into another buffer, for tests.kernels.aot."""
import torch

from kernels.rope import rope, rope_backward, rope_partials_shape
from tests.kernels.aot import H200

EXPECT = {
    # two halves of the heads, cos and sin
    "_rope_fwd": {"loads_16_bytes": 4, "stores_16_bytes": 2},
    # heads come by cp.async; what is loaded here is w
    "_rope_norm_bwd": {"loads_16_bytes": 4, "stores_16_bytes": 2},
}
W = 1 << 40


def cases(target: str) -> None:
    # H, K, Dh of smollm2-135m, qwen2.5-14b, qwen2.5-7b, llama3-8b and qwen3-8b, llama3-70b, 120b
    heads = ((9, 3, 64), (40, 8, 128), (28, 4, 128), (32, 8, 128), (64, 8, 128), (96, 8, 128))
    for H, K, Dh in heads if target == H200 else heads[:2]:
        qkv, other = torch.empty(2, 3, (H + 2 * K) * Dh, dtype=torch.bfloat16)
        angles = (*torch.empty(2, 8, Dh // 2), torch.zeros(3, dtype=torch.int32))
        norms = {"q_norm_addr": W, "k_norm_addr": W, "eps": 1e-6}
        partials = torch.empty(rope_partials_shape(Dh))
        rope(qkv, *angles, H, K, Dh, out=qkv)
        rope(qkv, *angles, H, K, Dh, out=other)
        rope(qkv, *angles, H, K, Dh, out=other, **norms)
        rope_backward(other, None, *angles, H, K, Dh)
        rope_backward(other, qkv, *angles, H, K, Dh, **norms, dq_norm_addr=W, dk_norm_addr=W, partials=partials)
