"""Small models and batches that several tests share."""
import dataclasses

import numpy as np
import torch

from model.block import Batch, Workspace, activation_shapes, rope_tables
from model.config import ModelConfig

TINY = ModelConfig("test", layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=48, vocab=131, max_positions=64)
# every optional part of a layer, one by one
VARIANTS = {
    "plain": TINY,
    "qkv bias": dataclasses.replace(TINY, qkv_bias=True),
    "q/k norm": dataclasses.replace(TINY, qk_norm=True),
    "both": dataclasses.replace(TINY, qkv_bias=True, qk_norm=True),
    "one kv head": dataclasses.replace(TINY, kv_heads=1),
}


@dataclasses.dataclass
class HostBatch:
    """A micro-batch as the engine takes it (data.batches makes the real ones)."""
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_start: np.ndarray
    doc_end: np.ndarray
    order: np.ndarray

    def on(self, device: str) -> Batch:
        return Batch(*(torch.from_numpy(a).to(device) for a in dataclasses.astuple(self)))


def packed(lengths: list[int], vocab: int, seed: int, masked: float = 0.0) -> HostBatch:
    """Documents of these lengths one after the other, random tokens; a share of the labels masked, ends always."""
    rng = np.random.default_rng(seed)
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths).astype(np.int32)
    ends = np.repeat(np.cumsum(lengths), lengths).astype(np.int32)
    tokens = rng.integers(0, vocab, sum(lengths), dtype=np.int32)
    labels = np.roll(tokens, -1)
    labels[rng.random(len(labels)) < masked] = -100
    labels[np.cumsum(lengths) - 1] = -100
    positions = np.arange(len(tokens), dtype=np.int32) - starts
    return HostBatch(tokens, labels, positions, starts, ends, np.argsort(tokens, kind="stable").astype(np.int32))


def workspace(c: ModelConfig, N: int, dtype: torch.dtype, device: str = "cpu", partials: int = 1) -> Workspace:
    """A workspace full of NaN, with its rotary tables; for fp64 the statistics are fp64 too."""
    def take(_name, shape, special=None):
        return torch.full(shape, float("nan"), dtype=torch.promote_types(special or dtype, dtype), device=device)
    ws = Workspace.take(c, N, N, partials, take)
    ws.cos, ws.sin = rope_tables(c, N, device)
    return ws


def saved_buffers(c: ModelConfig, N: int, names: tuple[str, ...], dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Buffers full of NaN for what forward shall save."""
    shapes = activation_shapes(c, N)
    lse = torch.promote_types(torch.float32, dtype)
    return {n: torch.full(shapes[n], float("nan"), dtype=lse if n == "lse" else dtype, device=device) for n in names}


def random_weights(layout, dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """A flat buffer of a layout: matrices of a size that keeps activations near 1, norms near 1, NaN in the padding."""
    g = torch.Generator().manual_seed(seed)
    flat = torch.full((layout.numel,), float("nan"), dtype=torch.float64)
    for name, span in layout.tensors.items():
        values = torch.randn(span.numel, generator=g, dtype=torch.float64) * (0.1 if len(span.shape) == 1 else span.shape[-1] ** -0.5)
        flat[span.offset:span.end] = values + (1.0 if "norm" in name else 0.0)
    return flat.to(dtype).to(device)
