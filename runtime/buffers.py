"""Everything that lies on the device, in the order it is laid out. Taken from a counting arena, it is the plan's table."""
import dataclasses
from collections.abc import Callable

import torch

from model.block import SAVED, Workspace, activation_shapes
from model.config import ModelConfig
from model.head import HeadSpace
from model.layout import block_layout, embedding_layout, head_layout

# int32 [N] each, in the order of model.block.Batch
BATCH_ARRAYS = ("tokens", "labels", "positions", "doc_start", "doc_end", "order")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides the size of every buffer.

    T: tokens in a sequence. micro_rows: sequences in a micro-batch. micro_batches: of a step. keep: what each layer
    saves, a set of model.block.SAVED's names. slots: weight buffers that the layers share. head_chunk: tokens whose
    logits are alive at once. dtype: of working weights and activations. grad_dtype: in which gradients leave the device.
    partials: fp32 elements of reduction scratch that the kernels ask for. resident: units whose state lies on the device.
    """
    config: ModelConfig
    T: int
    micro_rows: int
    micro_batches: int
    keep: tuple[frozenset[str], ...]
    slots: int
    head_chunk: int
    dtype: torch.dtype
    grad_dtype: torch.dtype
    partials: int
    resident: frozenset[int] = frozenset()

    @property
    def N(self) -> int:
        """Rows of a micro-batch."""
        return self.micro_rows * self.T


@dataclasses.dataclass
class Buffers:
    """Device memory of an engine; shapes in comments, M micro-batches."""
    layer_slots: list[torch.Tensor]           # none of a kind whose units are all resident
    embedding_slots: list[torch.Tensor]
    head_slots: list[torch.Tensor]
    grads: torch.Tensor                       # fp32, the largest unit
    tied_grads: torch.Tensor | None           # fp32, the embedding's layout: the head's share of a tied matrix
    stages: list[torch.Tensor]
    boundaries: list[list[torch.Tensor]]      # [L + 1][M] of [N, D]
    saved: list[list[dict[str, torch.Tensor]]]
    dx: list[torch.Tensor]                    # [M] of [N, D]
    batch_memory: torch.Tensor                # int32 [M, arrays, N]: model.block.Batch of each
    verdicts: torch.Tensor                    # fp64 [units, 3]: sum of squares, not finite, loss
    factors: torch.Tensor                     # fp32 [units]: what a resident unit's gradient is multiplied with, NaN: no update
    losses: torch.Tensor                      # fp64 [M]
    workspace: Workspace
    head: HeadSpace

    @classmethod
    def take(cls, s: Shape, take: Callable[..., torch.Tensor]) -> "Buffers":
        """`take(purpose, shape, dtype=working dtype)` hands out memory, as runtime.arena.Arena does."""
        c, f32, f64 = s.config, torch.float32, torch.float64
        block, embedding, head = block_layout(c), embedding_layout(c), head_layout(c)
        largest = max(layout.numel for layout in (block, embedding, head))

        def slots(layout, units: range, num: int) -> list[torch.Tensor]:
            streamed = [u for u in units if u not in s.resident]
            return [take("slots", (layout.numel,)) for _ in range(min(num, len(streamed)))]
        return cls(
            layer_slots=slots(block, range(1, c.layers + 1), s.slots), embedding_slots=slots(embedding, range(1), 1),
            head_slots=slots(head, range(c.layers + 1, c.layers + 2), 1),
            grads=take("gradients", (largest,), f32),
            tied_grads=take("gradients", (embedding.numel,), f32) if c.tied else None,
            stages=[take("gradients", (largest,), s.grad_dtype) for _ in range(2)],
            boundaries=[[take("boundaries", (s.N, c.hidden)) for _ in range(s.micro_batches)] for _ in range(c.layers + 1)],
            saved=[[take_saved(s, keep, take) for _ in range(s.micro_batches)] for keep in s.keep],
            dx=[take("boundaries", (s.N, c.hidden)) for _ in range(s.micro_batches)],
            batch_memory=take("batch", (s.micro_batches, len(BATCH_ARRAYS), s.N), torch.int32),
            verdicts=take("batch", (c.layers + 2, 3), f64), factors=take("batch", (c.layers + 2,), f32),
            losses=take("batch", (s.micro_batches,), f64),
            workspace=Workspace.take(c, s.N, s.T, s.partials, _to("workspace", take)),
            head=HeadSpace.take(c, s.N, s.head_chunk, _to("head", take)))


def take_saved(s: Shape, keep: frozenset[str], take: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one layer saves of one micro-batch."""
    shapes = activation_shapes(s.config, s.N)
    names = [name for part in SAVED if part in keep for name in SAVED[part]]
    return {name: take("activations", shapes[name], torch.float32 if name == "lse" else s.dtype) for name in names}


def _to(purpose: str, take: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`take` that books everything under one purpose."""
    return lambda _name, shape, dtype=None: take(purpose, shape, dtype)
