"""A trainer on the CPU for tests: small, with whatever streams, operations and optimizer a test brings."""
import contextlib
import dataclasses
import json
import pathlib
import types
from unittest import mock

import numpy as np
import torch

from model import reference
from runtime.arena import Arena
from runtime.host import NoPinner
from runtime.machine import Machine
from runtime.optimizer import AdamW, HostOptimizer, Schedule
from runtime.plan import Request, device_table, make_plan
from runtime.state import unit_layouts
from runtime.streams import cpu_streams
from runtime.trainer import Trainer
from tests.late_streams import fill_nan
from tests.models import HostBatch, packed

MACHINE = Machine(name="test", cpu_cores=2, host_bytes=8 << 30, host_limit_source="test")
CASES = pathlib.Path(__file__).parents[1] / "cases"


def case(name):
    """The numbers of a file of tests/cases."""
    return json.loads((CASES / f"{name}.json").read_text())


# the settings of adamw.json
HAND = dict(lr=case("adamw")["lr"], beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, clip="none")


def adamw(**changes):
    schedule = {k: changes.pop(k) for k in list(changes) if k in ("lr", "kind", "warmup", "steps")}
    return AdamW(Schedule(**dict(lr=1e-2, kind="constant", warmup=0, steps=10) | schedule), **changes)


class NaNArena(Arena):
    """Device memory is full of NaN at first, so that what is read before it was written shows. num_bytes: its size."""

    def __init__(self, device, num_bytes, dtype):
        super().__init__(device, num_bytes, dtype)
        self.num_bytes = num_bytes
        fill_nan(self._memory)


@contextlib.contextmanager
def trainer(c, *, T=24, rows=2, micro_rows=1, precision="fp32", grads="bf16", slots=2, streams=None, threads=1, seed=0, keep=None,
            resident=0, ops=reference, optimizer=HostOptimizer, **adam):
    """A trainer with random weights; closed at the end. grads: fp32 whatever it says under precision fp32. adam: of AdamW
    and its schedule."""
    settings = adamw(**adam)
    plan = make_plan(Request(c, T, rows, micro_rows, precision, grads, settings.clip, "cpu", slots, resident), MACHINE, ops)
    if keep is not None:
        shape = dataclasses.replace(plan.shape, keep=(frozenset(keep),) * c.layers)
        plan = dataclasses.replace(plan, shape=shape, device=device_table(shape, "cpu"))
    arenas = []

    def arena(*args):
        arenas.append(NaNArena(*args))
        return arenas[-1]
    with mock.patch.multiple("runtime.trainer", Arena=arena, HostOptimizer=optimizer):
        made = Trainer(plan, settings, ops, streams or cpu_streams(), NoPinner(), threads)
    # the first one holds resident units
    made.arenas, made.arena = arenas, arenas[-1]
    try:
        made.state.initialize(seed)
        yield made
    finally:
        made.close()


# what a test puts in the place of an operation

def ops_with(**functions):
    """The reference's operations with some of them replaced."""
    return types.SimpleNamespace(**vars(reference) | functions)


def given_gradients(c, give, **functions):
    """Operations under which every gradient is 0 but for what `give(step, unit, grads)` writes into `grads`, by name,
    just before its norm is taken."""
    layouts, calls = unit_layouts(c), iter(range(1 << 30))

    def norm2(grad, **rest):
        # gradients come from the head down to the embedding
        step, before = divmod(next(calls), len(layouts))
        unit = len(layouts) - 1 - before
        give(step, unit, layouts[unit].bind(grad.zero_()))
        reference.norm2(grad, **rest)
    return ops_with(norm2=norm2, **functions)


def all_equal(value_of_step):
    """For `given_gradients`: every element of every tensor is the step's value."""
    def give(step, unit, grads):
        for name in grads.layout.tensors:
            grads.view(name).fill_(value_of_step[step])
    return give


# batches

def batches(c, steps, rows=2, T=24, seed=0):
    """`steps` lists of `rows` micro-batches of T tokens, each in two documents, a few labels masked."""
    return [[packed([T // 3, T - T // 3], c.vocab, seed + 100 * s + r, masked=0.2) for r in range(rows)] for s in range(steps)]


def joined(parts):
    """Micro-batches as one."""
    begin, shifted = 0, []
    for b in parts:
        shifted.append(dataclasses.replace(b, doc_start=b.doc_start + np.int32(begin), doc_end=b.doc_end + np.int32(begin)))
        begin += len(b.tokens)
    arrays = {f.name: np.concatenate([getattr(b, f.name) for b in shifted]) for f in dataclasses.fields(HostBatch)}
    return HostBatch(**arrays | {"order": np.argsort(arrays["tokens"], kind="stable").astype(np.int32)})


def row_of(documents, T):
    """A row of T tokens from documents, each (tokens, labels); padding is a document of its own, never supervised."""
    padding = T - sum(len(tokens) for tokens, _ in documents)
    documents = [*documents, ([0] * padding, [-100] * padding)]
    lengths = [len(tokens) for tokens, _ in documents]
    tokens, labels = (np.array(sum(parts, []), np.int32) for parts in zip(*documents, strict=True))
    ends = np.cumsum(lengths)
    starts, ends = (np.repeat(borders, lengths).astype(np.int32) for borders in (ends - lengths, ends))
    return HostBatch(tokens, labels, np.arange(T, dtype=np.int32) - starts, starts, ends,
                     np.argsort(tokens, kind="stable").astype(np.int32))


def grouped(rows, size):
    """The rows of a step as micro-batches of `size`."""
    return [joined(rows[i:i + size]) for i in range(0, len(rows), size)]


def supervised(micro_batches):
    return sum(int((b.labels >= 0).sum()) for b in micro_batches)


def masked(batch):
    """The same rows with nothing supervised."""
    return dataclasses.replace(batch, labels=np.full_like(batch.labels, -100))


# training, and what came of it

def train(made, steps):
    """Results of the steps, the state settled."""
    results = [made.step(micro_batches, supervised(micro_batches)) for micro_batches in steps]
    made.engine.settle()
    return results


def losses(results):
    return [r.loss for r in results]


def masters(made):
    made.engine.settle()
    return [made.state.master(u).clone() for u in range(len(made.state.layouts))]


def weights(made, unit):
    """Exact fp32 parameters of a unit, by name."""
    return made.state.layouts[unit].bind(masters(made)[unit])


def state_bytes(made, unit=None):
    """Every byte of hi, lo (or w), m and v: of a unit, or of all."""
    made.engine.settle()
    units = made.state.units if unit is None else [made.state.units[unit]]
    return b"".join(t.view(torch.uint8).numpy().tobytes() for u in units for t in (*u.masters, u.m, u.v))


def gradients(made):
    """What the last step's update read, fp32, one flat tensor a unit (exact clipping: a slab each)."""
    made.engine.settle()
    resident = made.state.resident
    return [(resident[u].gradient if u in resident else made.engine._slab_of[u].flat[:layout.numel]).float()
            for u, layout in enumerate(made.state.layouts)]


def fill(made, value, units=None):
    """All masters `value`, moments 0: of some units, or of all."""
    for unit in units or range(len(made.state.layouts)):
        made.state.load_record(unit, {name: torch.full_like(t, value if name.startswith("master") else 0.0)
                                      for name, t in made.state.record(unit).items()})


def records(made):
    """A copy of what a checkpoint would hold."""
    return {name: {key: t.clone() for key, t in make().items()} for name, make in made.records()}


def same(a, b):
    """Bitwise, NaN equal to NaN of the same bits."""
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


def relative_error(got, expected):
    """Of all tensors together."""
    got, expected = torch.cat([t.flatten() for t in got]).double(), torch.cat([t.flatten() for t in expected]).double()
    return ((got - expected).norm() / expected.norm()).item()
