"""Late streams behave as CUDA's do; under them no bit of training changes, whatever comes late."""
import dataclasses
import threading
import time

import pytest
import torch

from model.block import SAVED
from runtime.optimizer import HostOptimizer
from tests.late_streams import fill_nan, late_streams
from tests.models import TINY, VARIANTS
from tests.runtime.make import batches, losses, masters, same, train, trainer

ONE_LAYER = dataclasses.replace(TINY, layers=1)
TWO_LAYERS = dataclasses.replace(TINY, layers=2)
EVERYTHING = dataclasses.replace(VARIANTS["both"], tied=True)


def outcome(c, steps=3, **settings):
    """Losses, norms and masters after some steps."""
    with trainer(c, **settings) as made:
        results = train(made, batches(c, steps))
        return losses(results), [r.grad_norm for r in results], masters(made)


def agree(a, b):
    return a[:2] == b[:2] and same(a[2], b[2])


# the streams themselves

def test_a_late_stream_keeps_its_order_and_returns_at_once():
    done = []
    with late_streams(compute=0.01) as streams:
        for i in range(5):
            streams.compute.run(done.append, i)
        assert len(done) < 5
        event = streams.event()
        streams.compute.record(event)
        event.wait_host()
        assert done == [0, 1, 2, 3, 4]


def test_a_wait_is_for_the_last_record_before_it():
    with late_streams() as streams:
        event, last, gate, done = streams.event(), streams.event(), threading.Event(), []
        streams.compute.record(event)
        streams.h2d.wait(event)
        streams.h2d.run(done.append, "h2d")
        streams.h2d.record(last)
        streams.compute.run(gate.wait)
        streams.compute.record(event)
        last.wait_host()
        assert done == ["h2d"]
        gate.set()


def test_an_event_that_was_never_recorded_holds_nobody():
    with late_streams() as streams:
        never, after = streams.event(), streams.event()
        streams.d2h.wait(never)
        streams.d2h.record(after)
        after.wait_host()
        never.wait_host()


def test_a_copy_reads_its_source_late():
    source, target = torch.zeros(4), torch.ones(4)
    with late_streams(h2d=0.02) as streams:
        streams.h2d.copy(target, source)
        source.fill_(7.0)
    assert torch.equal(target, torch.full((4,), 7.0))


def test_an_error_on_a_stream_ends_all_work_and_reaches_the_host():
    done = []
    with pytest.raises(ZeroDivisionError), late_streams() as streams:
        behind = streams.event()
        streams.compute.run(lambda: 1 / 0)
        streams.compute.record(behind)
        streams.d2h.wait(behind)
        streams.d2h.run(done.append, "never")
        streams.d2h.record(behind)
        behind.wait_host()
    assert not done
    with pytest.raises(ZeroDivisionError), late_streams() as streams:
        streams.compute.run(lambda: 1 / 0)


def test_the_threads_end_with_their_block():
    before = threading.active_count()
    with late_streams():
        assert threading.active_count() == before + 3
    assert threading.active_count() == before


# the engine under them

@pytest.mark.parametrize("clip", ["exact", "layer", "none"])
@pytest.mark.parametrize("c", [TINY, EVERYTHING, ONE_LAYER], ids=["plain", "everything", "one layer"])
def test_late_streams_change_no_bit(c, clip):
    in_time = outcome(c, clip=clip)
    with late_streams(seed=0, compute=0.002, h2d=0.004, d2h=0.004, poison=True) as streams:
        assert agree(outcome(c, clip=clip, streams=streams), in_time)


def test_a_batch_is_waited_for_where_no_weights_are_on_their_way():
    """The second of two evaluations finds the embedding in its slot."""
    first, second = batches(ONE_LAYER, 2)
    with trainer(ONE_LAYER) as made:
        expected = [made.engine.evaluate(step) for step in (first, second, first)]
    with late_streams(h2d=0.05) as streams, trainer(ONE_LAYER, streams=streams) as made:
        assert [made.engine.evaluate(step) for step in (first, second, first)] == expected


class SlowUpdates(HostOptimizer):
    """Each unit's update begins 200 ms later."""

    def _update(self, job, factor, step, begin, end):
        time.sleep(0.2 if begin == 0 else 0.0)
        super()._update(job, factor, step, begin, end)


@pytest.mark.parametrize("late", ["update", "h2d"])
def test_OPT8_forward_waits_for_its_own_update_and_its_own_copy(late):
    in_time = outcome(TWO_LAYERS, steps=5)
    with late_streams(h2d=0.2 if late == "h2d" else 0.0) as streams:
        optimizer = SlowUpdates if late == "update" else HostOptimizer
        assert agree(outcome(TWO_LAYERS, steps=5, streams=streams, optimizer=optimizer), in_time)


@pytest.mark.parametrize("keep", [(), tuple(SAVED)], ids=["recomputed", "kept"])
def test_NUM3_activations_that_backward_has_used_may_be_anything(keep):
    in_time = outcome(TINY, keep=keep)
    with late_streams(seed=1, h2d=0.005, d2h=0.05, poison=True) as streams, trainer(TINY, keep=keep, streams=streams) as made:
        backward, buffers = made.engine._layer_backward, made.engine.buffers

        def poisoned(layer):
            backward(layer)
            for t in [*buffers.boundaries[layer], *(t for saved in buffers.saved[layer] for t in saved.values())]:
                fill_nan(t)
        made.engine._layer_backward = poisoned
        results = train(made, batches(TINY, 3))
        assert agree((losses(results), [r.grad_norm for r in results], masters(made)), in_time)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("clip", ["exact", "layer"])
def test_NUM4_the_update_waits_for_the_gradients_copy_and_the_stage_for_its_end(clip, precision):
    in_time = outcome(ONE_LAYER, steps=2, clip=clip, precision=precision)
    with late_streams(d2h=0.1, poison=True) as streams:
        assert agree(outcome(ONE_LAYER, steps=2, clip=clip, precision=precision, streams=streams), in_time)
