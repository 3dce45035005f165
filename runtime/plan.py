"""The plan: every byte on the host and on the device before the first one is touched, and whether they fit.

What is free to choose here: the micro-batch, which units' state stays in HBM (the first ones), and what each layer keeps for
backward, most useful first, until HBM is full; of all numbers of resident units, the one whose step is predicted shortest. A
machine without a GPU has one memory for both tables.
"""
import dataclasses
import types

import torch

from model.config import PRESETS, ModelConfig
from model.errors import UserError
from model.flops import KEEPS, keep_bytes, recompute_flops
from model.layout import num_params
from runtime.arena import Arena
from runtime.buffers import BATCH_ARRAYS, Buffers, Shape, take_saved
from runtime.host import PAGE_BYTES, round_to_pages
from runtime.machine import Machine, format_bytes
from runtime.predict import H200, step_seconds
from runtime.state import take_resident, unit_layouts, unit_name

# Python, torch, the CUDA context and its compiled kernels
HOST_RESERVE_BYTES = 3 << 29
DEVICE_RESERVE_BYTES = 3 << 29
# tokens whose work fills the GPU many times over; on a CPU, what stays near its caches
MICRO_TOKENS = {"cuda": 32768, "cpu": 4096}
HEAD_CHUNK = {"cuda": 8192, "cpu": 1024}
# gradients in flight where no global norm has to be waited for
ROTATING_SLABS = 4
# gradients accumulate and moments live in fp32
STATE_BYTES = 12


@dataclasses.dataclass(frozen=True)
class Request:
    """What a run asks for. rows: sequences a step. micro_rows: of a micro-batch, resident: units whose state lies on the device,
    from the first on; None lets the plan choose."""
    config: ModelConfig
    T: int
    rows: int
    micro_rows: int | None
    precision: str
    grads: str
    clip: str
    device: str
    slots: int = 2
    resident: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.precision]

    @property
    def grad_dtype(self) -> torch.dtype:
        """`--precision fp32` implies fp32 gradients."""
        return torch.float32 if "fp32" in (self.grads, self.precision) else torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request with everything chosen. host, device: bytes by purpose. num_slabs: host buffers of gradients. step_s: seconds
    a step is predicted to take, None on a CPU."""
    request: Request
    shape: Shape
    num_slabs: int
    host: dict[str, int]
    device: dict[str, int]
    machine: Machine
    step_s: float | None

    @property
    def missing(self) -> dict[str, int]:
        """Bytes that are not there, by memory; empty if the plan fits."""
        host, device = sum(self.host.values()), sum(self.device.values())
        if self.request.device == "cpu":
            wanted = {"host memory": (host + device, self.machine.host_bytes)}
        else:
            wanted = {"host memory": (host, self.machine.host_bytes), "HBM": (device, self.machine.hbm_free_bytes)}
        return {name: need - have for name, (need, have) in wanted.items() if need > have}

    def page(self) -> str:
        """The plan as a person reads it, one line a fact."""
        r, s, c = self.request, self.shape, self.request.config
        full = sum(len(keep) == len(KEEPS) for keep in s.keep)
        least = min(s.keep, key=len)
        lines = [
            f"plan  {c.name}: {num_params(c) / 1e9:.3g} B parameters, {c.layers} layers, working weights {r.precision}, "
            f"fp32 masters and moments",
            f"  step    {r.rows} sequences x {r.T} tokens = {r.rows * r.T}, in {s.micro_batches} micro-batches of {s.micro_rows}",
            f"  keep    boundaries everywhere; everything in {full} of {c.layers} layers"
            + ("" if full == c.layers else f", the others {', '.join(sorted(least)) or 'nothing else'}"),
            f"  clip    {r.clip}; gradients leave in {str(s.grad_dtype).removeprefix('torch.')}, {self.num_slabs} slabs",
            *self._places(),
            self._table("host", self.host, self.machine.host_bytes, self.machine.host_limit_source)]
        if r.device == "cpu":
            lines.append(self._table("compute", self.device, self.machine.host_bytes, "the same memory"))
        else:
            lines.append(self._table("HBM", self.device, self.machine.hbm_free_bytes, f"{self.machine.gpu_name}, free now"))
        return "\n".join(lines)

    def _places(self) -> list[str]:
        """Where updates run, and what the step is predicted to take; of a CPU there is nothing to tell."""
        if self.request.device == "cpu":
            return []
        units, resident = self.request.config.layers + 2, len(self.shape.resident)
        last = unit_name(self.request.config, resident - 1) if resident else ""
        where = {0: "host", units: "all resident in HBM"}.get(resident, f"resident in HBM up to {last}, host behind it")
        tokens = self.request.rows * self.request.T
        return [f"  update  {where}; a step is predicted to take {self.step_s:.3g} s, {tokens / self.step_s:,.0f} tokens/s"]

    def _table(self, name: str, table: dict[str, int], limit: int, source: str) -> str:
        parts = ", ".join(f"{purpose} {format_bytes(size)}" for purpose, size in table.items())
        return f"  {name:<8}{format_bytes(sum(table.values()))} of {format_bytes(limit)} ({source}): {parts}"


def make_plan(request: Request, machine: Machine, ops: types.ModuleType) -> Plan:
    """Chooses what is free; the result may not fit (`missing`). UserError where the request itself is wrong."""
    c = request.config
    if request.T > c.max_positions:
        raise UserError(f"--seq {request.T}: {c.name} has positions for {c.max_positions} tokens; at most --seq {c.max_positions}")
    micro_rows = request.micro_rows or _micro_rows(request)
    if request.rows % micro_rows:
        raise UserError(f"--micro-batch {micro_rows}: a step of --batch {request.rows} sequences does not divide into it")
    nothing = Shape(c, request.T, micro_rows, request.rows // micro_rows, (frozenset(),) * c.layers, request.slots,
                    HEAD_CHUNK[request.device], request.dtype, request.grad_dtype, ops.partials_elements(c, micro_rows * request.T))
    units = c.layers + 2
    if request.resident is not None and request.resident > units:
        raise UserError(f"--resident {request.resident}: {c.name} has {units} units (embedding, {c.layers} layers, head)")
    choices = range(units + 1) if request.resident is None and request.device == "cuda" else [request.resident or 0]
    plans = [_with_resident(request, nothing, num_resident, machine) for num_resident in choices]
    fitting = [p for p in plans if not p.missing]
    return min(fitting, key=lambda p: p.step_s or 0.0) if fitting else plans[0]


def _with_resident(request: Request, nothing: Shape, num_resident: int, machine: Machine) -> Plan:
    """The plan in which the first units are resident, with as much kept as fits beside them."""
    s = dataclasses.replace(nothing, resident=frozenset(range(num_resident)))
    num_streamed = request.config.layers + 2 - num_resident
    num_slabs = num_streamed if request.clip == "exact" else min(ROTATING_SLABS, num_streamed)
    host = host_table(s, request.clip, num_slabs)
    free = machine.host_bytes - sum(host.values()) if request.device == "cpu" else machine.hbm_free_bytes
    s = dataclasses.replace(s, keep=_choose_keep(s, free - sum(device_table(s, request.device).values())))
    seconds = step_seconds(s, request.clip, H200) if request.device == "cuda" else None
    return Plan(request, s, num_slabs, host, device_table(s, request.device), machine, seconds)


def refuse_unless_fits(plan: Plan, ops: types.ModuleType) -> None:
    """UserError that says what is missing where, and the largest preset that fits with the same request."""
    if not plan.missing:
        return
    lack = " and ".join(f"{format_bytes(size)} of {name}" for name, size in plan.missing.items())
    fitting = [c for c in sorted(PRESETS.values(), key=num_params, reverse=True)
               if num_params(c) < num_params(plan.request.config) and plan.request.T <= c.max_positions
               and not make_plan(dataclasses.replace(plan.request, config=c), plan.machine, ops).missing]
    hint = f"the largest model that fits is --model {fitting[0].name}" if fitting else "no preset fits with this --batch and --seq"
    raise UserError(f"--model {plan.request.config.name}: {lack} missing; {hint}")


def host_table(s: Shape, clip: str, num_slabs: int) -> dict[str, int]:
    """Bytes of pinned host memory by purpose, rounded to pages as they will be, and the reserve. A slab has a page for its
    verdict, the batch what the verdicts of all units take."""
    units = unit_layouts(s.config)
    numels = [layout.numel for u, layout in enumerate(units) if u not in s.resident]
    item = s.dtype.itemsize
    table = {"masters": sum(round_to_pages(n * item) + (round_to_pages(n * 2) if item == 2 else 0) for n in numels),
             "moments": 2 * sum(round_to_pages(n * 4) for n in numels),
             "slabs": sum(round_to_pages(n * s.grad_dtype.itemsize) + PAGE_BYTES for n in slab_numels(s, clip, num_slabs)),
             "batch": round_to_pages(s.micro_batches * len(BATCH_ARRAYS) * s.N * 4) + round_to_pages(len(units) * 3 * 8)}
    return table | {"reserve": HOST_RESERVE_BYTES}


def slab_numels(s: Shape, clip: str, num_slabs: int) -> list[int]:
    """Elements of each slab, in the order in which gradients come: head, layers from the last, embedding."""
    numels = [layout.numel for u, layout in reversed(list(enumerate(unit_layouts(s.config)))) if u not in s.resident]
    return numels if clip == "exact" else [max(numels, default=0)] * num_slabs


def device_table(s: Shape, device: str) -> dict[str, int]:
    """Bytes on the device by purpose, counted by laying them out without memory."""
    arena = Arena("meta", 0, s.dtype)
    take_resident(s.config, s.dtype, s.grad_dtype, s.resident, arena.take)
    Buffers.take(s, arena.take)
    return arena.table | ({"reserve": DEVICE_RESERVE_BYTES} if device == "cuda" else {})


def _micro_rows(request: Request) -> int:
    """The most sequences that divide the step and stay within MICRO_TOKENS."""
    fits = [d for d in range(1, request.rows + 1) if request.rows % d == 0 and d * request.T <= MICRO_TOKENS[request.device]]
    return max(fits, default=1)


def _choose_keep(s: Shape, free_bytes: int) -> tuple[frozenset[str], ...]:
    """Gives each layer what saves the most FLOPs a byte, layer after layer, while there is room."""
    c, item = s.config, s.dtype.itemsize
    everything = recompute_flops(c, (), s.T)

    def worth(name: str) -> float:
        return (everything - recompute_flops(c, (name,), s.T)) / keep_bytes(c, (name,), item)
    keep = [set() for _ in range(c.layers)]
    for name in sorted(KEEPS, key=worth, reverse=True):
        arena = Arena("meta", 0, s.dtype)
        take_saved(s, frozenset({name}), arena.take)
        size = arena.used_bytes * s.micro_batches
        for layer in range(c.layers):
            if size <= free_bytes:
                keep[layer].add(name)
                free_bytes -= size
    return tuple(frozenset(names) for names in keep)

