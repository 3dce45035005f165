"""The model's state: masters and moments of every unit, 12 bytes a parameter, in host memory or, for resident units, in HBM.

    bf16   hi (bf16, streams to the GPU), lo (int16):  master bits = (hi bits << 16) + lo
    fp32   w (fp32, streams as it is)
    both   m, v (fp32)

Units, in the order of the forward pass: the embedding, the layers, the head. One layout a kind, one region of pinned
memory a purpose. A resident unit's `hi` is what the device computes with, and its gradient stays there too.
"""
import dataclasses
import math
from collections.abc import Callable, Iterable

import torch

from model.config import ModelConfig
from model.layout import Layout, block_layout, embedding_layout, head_layout
from runtime.host import HostMemory
from runtime.host_adamw import join, split

# purposes of what a resident unit takes of the device
RESIDENT = ("resident state", "resident gradients")
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
    """Flat tensors of one unit. masters: (hi, lo) or (w,); the first one streams. gradient: of a resident unit, rounded."""
    masters: tuple[torch.Tensor, ...]
    m: torch.Tensor
    v: torch.Tensor
    gradient: torch.Tensor | None = None


def master_names(dtype: torch.dtype) -> tuple[tuple[str, torch.dtype], ...]:
    """Name and dtype of what the masters are stored in, for working weights of `dtype`."""
    return {torch.bfloat16: (("hi", torch.bfloat16), ("lo", torch.int16)), torch.float32: (("w", torch.float32),)}[dtype]


def take_resident(c: ModelConfig, dtype: torch.dtype, grad_dtype: torch.dtype, resident: Iterable[int],
                  take: Callable[..., torch.Tensor]) -> dict[int, UnitState]:
    """State of these units on the device; `take(purpose, shape, dtype)` hands out memory, as runtime.arena.Arena does."""
    layouts = unit_layouts(c)

    def unit_state(n: int) -> UnitState:
        masters = tuple(take(RESIDENT[0], (n,), item) for _, item in master_names(dtype))
        m, v = (take(RESIDENT[0], (n,), torch.float32) for _ in range(2))
        return UnitState(masters, m, v, take(RESIDENT[1], (n,), grad_dtype))
    return {unit: unit_state(layouts[unit].numel) for unit in sorted(resident)}


class ModelState:
    """All units' state; `updates[u]` counts how often unit u was written, which is the version of its working weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, memory: HostMemory, resident: dict[int, UnitState]):
        """dtype: of the working weights, bf16 or fp32. memory: what hands out pinned regions, for units that are not resident."""
        self.config, self.dtype, self.resident = config, dtype, resident
        self.layouts = unit_layouts(config)
        self.updates = [0] * len(self.layouts)
        self.applied_steps = 0
        on_host = [u for u in range(len(self.layouts)) if u not in resident]

        def region(purpose, item):
            flats = memory.allocate(purpose, [self.layouts[u].numel * item.itemsize for u in on_host]) if on_host else []
            return {u: flat.view(item) for u, flat in zip(on_host, flats, strict=True)}
        masters = [region(name, item) for name, item in master_names(dtype)]
        m, v = (region(name, torch.float32) for name in ("m", "v"))
        # host memory is zero when it is taken
        for unit in resident.values():
            for t in (*unit.masters, unit.m, unit.v, unit.gradient):
                t.zero_()
        units = resident | {u: UnitState(tuple(r[u] for r in masters), m[u], v[u]) for u in on_host}
        self.units = [units[u] for u in range(len(self.layouts))]
        # pinned host memory of the working weights, as (tensor, first element); none of a resident unit
        self.pieces = [[] if u in resident else [(part.view(dtype), begin // dtype.itemsize) for part, begin in
                                                 memory.pieces(unit.masters[0].view(torch.uint8))] for u, unit in enumerate(self.units)]

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
        self._wait_written()

    def _wait_written(self) -> None:
        """What was written to the device is there for every stream."""
        if any(each.m.device.type == "cuda" for each in self.resident.values()):
            torch.cuda.synchronize()

    def _write(self, unit: int, begin: int, values: torch.Tensor) -> None:
        masters = [t[begin:begin + values.numel()] for t in self.units[unit].masters]
        if len(masters) == 1:
            masters[0].copy_(values)
            return
        hi, lo = (t if t.device.type == "cpu" else torch.empty(t.shape, dtype=t.dtype) for t in masters)
        split(values.numpy(), hi.view(torch.int16).numpy(), lo.numpy())
        for kept, made in zip(masters, (hi, lo), strict=True):
            if kept is not made:
                kept.copy_(made)

    def master(self, unit: int) -> torch.Tensor:
        """The unit's exact fp32 parameters, flat on the host: a copy where they are stored in halves or on the device."""
        masters = [t.cpu() for t in self.units[unit].masters]
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
        flats = {"master": self.master(unit), "m": self.units[unit].m.cpu(), "v": self.units[unit].v.cpu()}
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
        self._wait_written()
