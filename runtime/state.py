"""The model's state in host memory: masters and moments of every unit, 12 bytes a parameter.

    bf16   hi (bf16, streams to the GPU), lo (int16):  master bits = (hi bits << 16) + lo
    fp32   w (fp32, streams as it is)
    both   m, v (fp32)

Units, in the order of the forward pass: the embedding, the layers, the head. One layout a kind, one region of pinned
memory a purpose.
"""
import dataclasses
import math
from collections.abc import Callable

import torch

from model.config import ModelConfig
from model.layout import Layout, block_layout, embedding_layout, head_layout
from runtime.host import HostMemory
from runtime.host_adamw import join, split

# parameters made at a time when weights are drawn
_INIT_CHUNK = 1 << 26


def init_std(c: ModelConfig) -> float:
    """Standard deviation of a fresh matrix; those that write into the residual stream get it over sqrt(2 L).

    Source: Nguyen & Salazar, arXiv 1910.05895, section 2.2; Shoeybi et al., arXiv 1909.08053, section 3.
    """
    return math.sqrt(2 / (5 * c.hidden))


def unit_layouts(c: ModelConfig) -> list[Layout]:
    """Layout of each unit: embedding, layers, head."""
    block = block_layout(c)
    return [embedding_layout(c), *[block] * c.layers, head_layout(c)]


def unit_name(c: ModelConfig, unit: int) -> str:
    """embedding, layer 0, ..., head: how messages and checkpoints call it."""
    return "embedding" if unit == 0 else "head" if unit == c.layers + 1 else f"layer {unit - 1}"


@dataclasses.dataclass
class UnitState:
    """Flat host tensors of one unit. masters: (hi, lo) or (w,); the first one streams."""
    masters: tuple[torch.Tensor, ...]
    m: torch.Tensor
    v: torch.Tensor


class HostState:
    """All units' state; `updates[u]` counts how often unit u was written, which is the version of its working weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, memory: HostMemory):
        """dtype: of the working weights, bf16 or fp32. memory: what hands out pinned regions."""
        self.config, self.dtype = config, dtype
        self.layouts = unit_layouts(config)
        self.updates = [0] * len(self.layouts)
        self.applied_steps = 0
        names = {torch.bfloat16: (("hi", torch.bfloat16), ("lo", torch.int16)), torch.float32: (("w", torch.float32),)}[dtype]

        def region(purpose, item):
            return [flat.view(item) for flat in memory.allocate(purpose, [n.numel * item.itemsize for n in self.layouts])]
        masters = [region(name, item) for name, item in names]
        moments = [region(name, torch.float32) for name in ("m", "v")]
        self.units = [UnitState(tuple(r[u] for r in masters), moments[0][u], moments[1][u]) for u in range(len(self.layouts))]
        self.pieces = [[(part.view(dtype), begin // dtype.itemsize) for part, begin in memory.pieces(unit.masters[0].view(torch.uint8))]
                       for unit in self.units]

    def initialize(self, seed: int, device: torch.device | str = "cpu", progress: Callable[[int], None] | None = None) -> None:
        """Random weights: normal(0, init_std), norms 1, biases 0; moments 0. Drawn on `device`, the same bits for the same
        seed and device kind."""
        for unit, layout in enumerate(self.layouts):
            generator = torch.Generator(device).manual_seed(seed * 1_000_003 + unit)
            for name, span in layout.tensors.items():
                std = init_std(self.config) / (math.sqrt(2 * self.config.layers) if name in ("o", "down") else 1)
                for begin in range(span.offset, span.end, _INIT_CHUNK):
                    n = min(_INIT_CHUNK, span.end - begin)
                    if "norm" in name or "bias" in name:
                        values = torch.full((n,), 1.0 if "norm" in name else 0.0)
                    else:
                        values = torch.empty(n, device=device).normal_(0, std, generator=generator).cpu()
                    self._write(unit, begin, values)
            self.updates[unit] += 1
            if progress:
                progress(unit)

    def _write(self, unit: int, begin: int, values: torch.Tensor) -> None:
        masters = [t[begin:begin + values.numel()] for t in self.units[unit].masters]
        if len(masters) == 1:
            masters[0].copy_(values)
        else:
            split(values.numpy(), masters[0].view(torch.int16).numpy(), masters[1].numpy())

    def master(self, unit: int) -> torch.Tensor:
        """The unit's exact fp32 parameters, flat: a copy where they are stored in halves."""
        masters = self.units[unit].masters
        if len(masters) == 1:
            return masters[0]
        out = torch.empty(masters[0].numel())
        join(masters[0].view(torch.int16).numpy(), masters[1].numpy(), out.numpy())
        return out

    def not_finite(self, unit: int, gradient: torch.Tensor) -> list[str]:
        """Names of the unit's tensors with NaN or inf in `gradient` (flat, at least the unit's size)."""
        grads = self.layouts[unit].bind(gradient[: self.layouts[unit].numel])
        return [f"{unit_name(self.config, unit)} {name}" for name in grads.layout.tensors
                if not grads.view(name).isfinite().all()]

    def record(self, unit: int) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of a unit: `master.NAME`, `m.NAME`, `v.NAME`, fp32."""
        flats = {"master": self.master(unit), "m": self.units[unit].m, "v": self.units[unit].v}
        layout = self.layouts[unit]
        return {f"{kind}.{name}": layout.bind(flat).view(name) for kind, flat in flats.items() for name in layout.tensors}

    def load_record(self, unit: int, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `record`: bit for bit."""
        layout, state = self.layouts[unit], self.units[unit]
        for name, span in layout.tensors.items():
            self._write(unit, span.offset, tensors[f"master.{name}"].reshape(-1))
            layout.bind(state.m).view(name).copy_(tensors[f"m.{name}"])
            layout.bind(state.v).view(name).copy_(tensors[f"v.{name}"])
        self.updates[unit] += 1
