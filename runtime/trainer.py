"""A model in training: takes the memory that the plan lists, builds the engine over it, steps, evaluates, saves."""
import types
from collections.abc import Callable, Sequence

import torch

from model.block import rope_tables
from runtime.arena import Arena
from runtime.buffers import BATCH_ARRAYS, Buffers
from runtime.engine import Engine, MicroBatch, StepResult
from runtime.host import HostMemory, Pinner
from runtime.optimizer import AdamW, HostOptimizer
from runtime.plan import Plan, slab_numels
from runtime.slabs import Slab, Slabs
from runtime.state import HostState, unit_name
from runtime.streams import Streams


def choose_ops(device: str, precision: str) -> types.ModuleType:
    """Our kernels for bf16 on a GPU; plain torch on a CPU, and for fp32, where it is the oracle."""
    if device == "cuda" and precision == "bf16":
        # Triton is there on Linux alone; who trains on a CPU does not need it
        import model.fused
        return model.fused
    import model.reference
    return model.reference


class Trainer:
    """Everything a plan asks for, allocated and wired. Close it: pinned memory is given back, the thread ends."""

    def __init__(self, plan: Plan, adamw: AdamW, ops: types.ModuleType, streams: Streams, pinner: Pinner, threads: int,
                 progress: Callable[[str], None] = lambda line: None):
        """threads: of the update. progress: gets a line when something takes long."""
        s, c = plan.shape, plan.request.config
        self.plan, self.progress = plan, progress
        self.memory = HostMemory(pinner)
        try:
            progress("taking host memory")
            self.state = HostState(c, s.dtype, self.memory)
            batch, verdicts = self.memory.allocate("batch", [4 * s.micro_batches * len(BATCH_ARRAYS) * s.N, 8 * 3 * (c.layers + 2)])
            device = plan.request.device
            arena = Arena(device, sum(size for name, size in plan.device.items() if name != "reserve"), s.dtype)
            buffers = Buffers.take(s, arena.take)
            for table, values in zip((buffers.workspace.cos, buffers.workspace.sin), rope_tables(c, s.T, device), strict=True):
                table.copy_(values)
            if device == "cuda":
                # the tables were written on another stream than compute
                torch.cuda.synchronize()
            slabs = Slabs(self._make_slabs(streams), buffers.stages, streams)
            self.optimizer = HostOptimizer(self.state, adamw, threads)
            self.engine = Engine(s, self.state, self.optimizer, slabs, streams, buffers,
                                 batch.view(torch.int32).view(s.micro_batches, len(BATCH_ARRAYS), s.N),
                                 verdicts.view(torch.float64).view(-1, 3), ops)
        except BaseException:
            self.memory.close()
            raise

    def _make_slabs(self, streams: Streams) -> list[Slab]:
        s, request = self.plan.shape, self.plan.request
        numels = slab_numels(s, request.clip, self.plan.num_slabs)
        flats = self.memory.allocate("slabs", [n * s.grad_dtype.itemsize for n in numels])
        verdicts = self.memory.allocate("verdicts", [24] * len(numels))
        slabs = []
        for flat, verdict in zip(flats, verdicts, strict=True):
            pieces = [(part.view(s.grad_dtype), begin // s.grad_dtype.itemsize) for part, begin in self.memory.pieces(flat)]
            slabs.append(Slab(flat.view(s.grad_dtype), pieces, verdict.view(torch.float64), streams.event()))
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
        self.optimizer.close()
        self.memory.close()
