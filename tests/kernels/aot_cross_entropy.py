"""The presets' heads, for tests.kernels.aot: losses alone, and with gradients."""
import torch

from kernels.cross_entropy import linear_cross_entropy
from tests.kernels.aot import H200

EXPECT = {"_cross_entropy": {"loads_16_bytes": 2}}
W = 1 << 40


def cases(target: str) -> None:
    N = 5
    labels, losses = torch.zeros(N, dtype=torch.int32), torch.empty(N)
    for V, D in ((49152, 576), (32000, 4096), (152064, 5120), (128256, 12288)) if target == H200 else ((32000, 4096),):
        x, dx = torch.empty(2, N, D, dtype=torch.bfloat16)
        logits = torch.empty(2, V, dtype=torch.bfloat16)
        linear_cross_entropy(x, W, labels, 1.0, V=V, logits=logits, losses=losses)
        linear_cross_entropy(x, W, labels, 1 / 32768, V=V, logits=logits, losses=losses, dx=dx, dw_addr=W)
