"""A model in training: takes the memory that the plan lists, builds the engine over it, steps, evaluates, saves."""
import types
from collections.abc import Callable, Sequence

import torch

from model import reference
from model.block import rope_tables
from runtime.arena import Arena
from runtime.buffers import BATCH_ARRAYS, Buffers, Shape
from runtime.engine import Engine, MicroBatch, StepResult
from runtime.host import HostMemory, Pinner
from runtime.optimizer import AdamW, HostOptimizer
from runtime.plan import Plan, slab_numels
from runtime.slabs import Slab, Slabs
from runtime.state import RESIDENT, ModelState, take_resident, unit_name
from runtime.streams import Streams


def choose_ops(device: str, precision: str) -> types.ModuleType:
    """Our kernels for bf16 on a GPU; plain torch on a CPU, and for fp32, where it is the oracle."""
    if device == "cuda" and precision == "bf16":
        # Triton is there on Linux alone; who trains on a CPU does not need it
        from model import fused
        return fused
    return reference


class Trainer:
    """Everything a plan asks for, allocated and wired. Close it: pinned memory is given back, the thread ends."""

    def __init__(self, plan: Plan, adamw: AdamW, ops: types.ModuleType, streams: Streams, pinner: Pinner, threads: int,
                 progress: Callable[[int], None] = lambda done: None):
        """threads: of the update. progress: gets the bytes of host memory taken so far."""
        self.plan, self.ops, self.streams = plan, ops, streams
        self.memory, self.optimizer = HostMemory(pinner, progress=progress), None
        try:
            self.state = self._make_state(plan.shape)
            self._slabs = self._make_slabs()
            self._batch = [torch.empty(0, dtype=torch.uint8)] * 2
            self.optimizer = HostOptimizer(self.state, adamw, threads, plan.shape.grad_dtype)
            self.lay_out(plan)
        except BaseException:
            self.close()
            raise

    def lay_out(self, plan: Plan) -> None:
        """Takes the device's memory and builds the engine over it; again, for another plan of the same model, clip and resident
        units."""
        self.plan, s, c = plan, plan.shape, plan.request.config
        # the old arena has to go before the new one is taken
        self.engine = None
        batch, verdicts = self._host_batch(4 * s.micro_batches * len(BATCH_ARRAYS) * s.N, 8 * 3 * (c.layers + 2))
        others = ("reserve", *RESIDENT)
        arena = Arena(plan.request.device, sum(size for name, size in plan.device.items() if name not in others), s.dtype)
        buffers = Buffers.take(s, arena.take)
        for table, values in zip((buffers.workspace.cos, buffers.workspace.sin), rope_tables(c, s.T, arena.device), strict=True):
            table.copy_(values)
        if arena.device.type == "cuda":
            # the tables were written on another stream than compute
            torch.cuda.synchronize()
        self.engine = Engine(s, self.state, self.optimizer, Slabs(self._slabs, buffers.stages, self.streams), self.streams, buffers,
                             batch.view(torch.int32).view(s.micro_batches, len(BATCH_ARRAYS), s.N),
                             verdicts.view(torch.float64).view(-1, 3), self.ops)

    def _make_state(self, s: Shape) -> ModelState:
        """The resident units' state has an arena of its own: it stays when another plan is laid out."""
        arena = Arena(self.plan.request.device, sum(self.plan.device.get(name, 0) for name in RESIDENT), s.dtype)
        resident = take_resident(s.config, s.dtype, s.grad_dtype, s.resident, arena.take)
        return ModelState(s.config, s.dtype, self.memory, resident)

    def _host_batch(self, *sizes: int) -> list[torch.Tensor]:
        """Pinned memory of these sizes; what an earlier plan took is used again if it is enough."""
        if any(have.numel() < size for have, size in zip(self._batch, sizes, strict=True)):
            self._batch = self.memory.allocate("batch", sizes)
        return [have[:size] for have, size in zip(self._batch, sizes, strict=True)]

    def _make_slabs(self) -> list[Slab]:
        s, request = self.plan.shape, self.plan.request
        numels = slab_numels(s, request.clip, self.plan.num_slabs)
        if len(s.resident) == s.config.layers + 2:
            # no gradient leaves the device
            return []
        flats = self.memory.allocate("slabs", [n * s.grad_dtype.itemsize for n in numels])
        verdicts = self.memory.allocate("verdicts", [24] * len(numels))
        slabs = []
        for flat, verdict in zip(flats, verdicts, strict=True):
            pieces = [(part.view(s.grad_dtype), begin // s.grad_dtype.itemsize) for part, begin in self.memory.pieces(flat)]
            slabs.append(Slab(flat.view(s.grad_dtype), pieces, verdict.view(torch.float64), self.streams.event()))
        return slabs

    def step(self, micro_batches: Sequence[MicroBatch], supervised: int, meanwhile: Callable[[], None] = lambda: None) -> StepResult:
        """One step; `meanwhile` runs on the host while the device works."""
        self.engine.begin(micro_batches, supervised)
        meanwhile()
        return self.engine.decide()

    def records(self) -> list[tuple[str, Callable[[], dict[str, torch.Tensor]]]]:
        """What a checkpoint holds: a name and a function for each unit. Settled state only."""
        self.engine.settle()
        return [(unit_name(self.plan.request.config, unit).replace(" ", "-"), lambda unit=unit: self.state.record(unit))
                for unit in range(len(self.state.layouts))]

    def load(self, records, applied_steps: int) -> None:
        """Takes masters and moments from `records` (name -> tensors, as `records` names them)."""
        for unit in range(len(self.state.layouts)):
            self.state.load_record(unit, records[unit_name(self.plan.request.config, unit).replace(" ", "-")])
        self.state.applied_steps = applied_steps

    def close(self) -> None:
        """Ends the update thread and gives pinned memory back; what was not saved is gone."""
        if self.optimizer is not None:
            self.optimizer.close()
        self.memory.close()
