"""Gather and ordered scatter-add at the presets' widths, for tests.kernels.aot."""
import torch

from kernels.embedding import CHUNK, embedding, embedding_backward, embedding_partials_shape
from tests.kernels.aot import H200

EXPECT = {
    "_embedding_fwd": {"loads_16_bytes": 1, "stores_16_bytes": 1},
    "_embedding_bwd": {"loads_16_bytes": 2, "stores_16_bytes": 2},
    "_embedding_heads_bwd": {"loads_16_bytes": 8},
}
W = 1 << 40


def cases(target: str) -> None:
    N = CHUNK + 1
    for D in (576, 3584, 4096, 5120, 8192, 12288) if target == H200 else (576, 5120):
        rows, tokens = torch.empty(N, D, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.int32)
        embedding(tokens, W, out=rows)
        embedding_backward(rows, tokens, tokens, W, partials=torch.empty(embedding_partials_shape(N, D)))
