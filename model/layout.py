"""Layout: where each parameter of a layer lies in ONE flat buffer. The same map serves a host master, a slot, a
gradient buffer, a slab and a checkpoint record, so that writer and reader cannot disagree.

    small tensors first (norms, biases: no weight decay), then matrices (decay)
    every offset is a multiple of 128 elements: 256 bytes in bf16, 512 in fp32
    q, k, v are adjacent, and gate, up: `qkv` and `gate_up` name them as one matrix
"""
import dataclasses
import math

import torch

from model.config import ModelConfig

# 256 bytes of bf16: more than TMA (16) and coalescing (128) ask for
OFFSET_ELEMENTS = 128


@dataclasses.dataclass(frozen=True)
class Span:
    """One tensor in a flat buffer: offset and number of elements, shape."""
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


class Layout:
    """Names, offsets and shapes of the tensors in a flat buffer of `numel` elements.

    small, matrices: shape by name, in order. groups: adjacent matrices under one more name, rows joined.
    Elements from `decay_from` on are matrices. Raises ValueError if a group's members are not contiguous.
    """
    def __init__(self, small: dict[str, tuple[int, ...]], matrices: dict[str, tuple[int, ...]],
                 groups: dict[str, tuple[str, ...]] | None = None):
        self.tensors: dict[str, Span] = {}
        offset = 0
        for part in (small, matrices):
            if part is matrices:
                self.decay_from = offset
            for name, shape in part.items():
                self.tensors[name] = Span(offset, shape)
                offset = _aligned(self.tensors[name].end)
        self.numel = offset
        self.num_params = sum(span.numel for span in self.tensors.values())
        self._spans = self.tensors | {name: self._join(name, members) for name, members in (groups or {}).items()}

    def _join(self, group: str, members: tuple[str, ...]) -> Span:
        spans = [self.tensors[name] for name in members]
        for a, b in zip(spans, spans[1:], strict=False):
            if a.end != b.offset or a.shape[1:] != b.shape[1:]:
                raise ValueError(f"{group}: {members} are not one matrix in memory")
        return Span(spans[0].offset, (sum(s.shape[0] for s in spans), *spans[0].shape[1:]))

    def __contains__(self, name: str) -> bool:
        return name in self._spans

    def span(self, name: str) -> Span:
        return self._spans[name]

    def gaps(self) -> list[tuple[int, int]]:
        """(begin, end) of the padding between tensors and behind the last one."""
        ends = [0, *(span.end for span in self.tensors.values())]
        begins = [*(span.offset for span in self.tensors.values()), self.numel]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    def bind(self, flat: torch.Tensor) -> "Weights":
        """Names for the tensors in `flat` [numel]; copies nothing and allocates nothing."""
        if flat.numel() != self.numel or not flat.is_contiguous():
            raise ValueError(f"flat: {flat.numel()} elements, strides {flat.stride()}; wanted {self.numel}, contiguous")
        return Weights(self, flat)


class Weights:
    """A flat buffer with names: integer addresses for Triton, views for plain torch."""
    def __init__(self, layout: Layout, flat: torch.Tensor):
        self.layout, self.flat = layout, flat
        self._base, self._item = flat.data_ptr(), flat.element_size()

    def ptr(self, name: str) -> int:
        """Address of tensor or group `name`; 0 where this layer has none (an optional bias or norm)."""
        return self._base + self.layout.span(name).offset * self._item if name in self.layout else 0

    def view(self, name: str) -> torch.Tensor | None:
        """View of tensor or group `name`; None where this layer has none."""
        if name not in self.layout:
            return None
        span = self.layout.span(name)
        return self.flat[span.offset:span.end].view(span.shape)


def block_layout(c: ModelConfig) -> Layout:
    """The parameters of one decoder layer."""
    q, kv = c.attention_width, c.kv_heads * c.head_dim
    small = {"norm1": (c.hidden,), "norm2": (c.hidden,)}
    groups = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
    if c.qk_norm:
        small |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    if c.qkv_bias:
        # one vector: q, k and v of a single head of width 16 would not each start on 256 bytes
        small |= {"qkv_bias": (c.qkv_width,)}
    matrices = {"q": (q, c.hidden), "k": (kv, c.hidden), "v": (kv, c.hidden), "o": (c.hidden, q),
                "gate": (c.ffn, c.hidden), "up": (c.ffn, c.hidden), "down": (c.hidden, c.ffn)}
    return Layout(small, matrices, groups)


def embedding_layout(c: ModelConfig) -> Layout:
    """The token embedding; the head's matrix too where they are tied."""
    return Layout({}, {"embedding": (c.vocab, c.hidden)})


def head_layout(c: ModelConfig) -> Layout:
    """The final norm and, where it is not the embedding, the head's matrix."""
    return Layout({"norm": (c.hidden,)}, {} if c.tied else {"head": (c.vocab, c.hidden)})


def num_params(c: ModelConfig) -> int:
    """Parameters of the whole model, a tied matrix once."""
    return c.layers * block_layout(c).num_params + embedding_layout(c).num_params + head_layout(c).num_params


def _aligned(elements: int) -> int:
    return -(-elements // OFFSET_ELEMENTS) * OFFSET_ELEMENTS
