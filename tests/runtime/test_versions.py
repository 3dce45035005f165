"""Which version of its weights each reader sees, by counting: every update adds 1.0 to every master."""
import dataclasses

import pytest
import torch

from model import reference
from runtime.optimizer import HostOptimizer
from tests.late_streams import late_streams
from tests.models import TINY
from tests.runtime.make import batches, fill, ops_with, supervised, trainer

STEPS = 4


class Counting(HostOptimizer):
    """Stands where AdamW does."""

    def _update(self, job, factor, step, begin, end):
        # the remainders of small whole numbers are 0
        self.state.units[job.unit].masters[0][begin:end].add_(1.0)


class Reader:
    """The reference's operations; notes, as (unit kind, first, last), each slot that weights are taken from."""

    def __init__(self):
        self.slots, self.seen = {}, []
        self.ops = ops_with(operand=self._operand)

    def watch(self, engine):
        b = engine.buffers
        kinds = {"layer": b.layer_slots, "embedding": b.embedding_slots, "head": b.head_slots}
        self.slots = {buffer.data_ptr(): kind for kind, buffers in kinds.items() for buffer in buffers}

    def _operand(self, w, name):
        kind = self.slots.get(w.flat.data_ptr())
        if kind:
            self.seen.append((kind, w.flat[0].item(), w.flat[-1].item()))
        return reference.operand(w, name)

    def take(self):
        seen, self.seen = self.seen, []
        return seen


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_MEM9_in_step_t_every_reading_is_t(layers, tied, late):
    c, reader = dataclasses.replace(TINY, layers=layers, tied=tied), Reader()
    delays = dict(compute=0.0005, h2d=0.002, d2h=0.002) if late else {}
    with late_streams(seed=layers, **delays, poison=late) as streams, \
         trainer(c, streams=streams, ops=reader.ops, optimizer=Counting, keep=()) as made:
        fill(made, 0.0)
        reader.watch(made.engine)
        for t, step in enumerate(batches(c, STEPS)):
            assert not made.step(step, supervised(step)).skipped
            seen = reader.take()
            assert {(first, last) for _, first, last in seen} == {(float(t), float(t))}, f"step {t}"
            # forward, recompute and backward of each layer, the embedding and the head were all among them
            assert {kind for kind, _, _ in seen} == {"layer", "embedding", "head"}
            made.engine.evaluate(step)
            assert {(first, last) for _, first, last in reader.take()} == {(t + 1.0, t + 1.0)}
        made.engine.settle()
        assert all(torch.equal(u.masters[0], torch.full_like(u.masters[0], STEPS)) for u in made.state.units)
