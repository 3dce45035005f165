"""A slot serves the weights of the version asked for, and is not written while somebody reads it."""
import dataclasses

import pytest
import torch

from model.layout import Layout
from runtime.slots import Slots
from runtime.streams import cpu_streams
from tests.late_streams import late_streams
from tests.models import TINY
from tests.runtime.make import batches, losses, masters, records, same, supervised, train, trainer

SMALL = dataclasses.replace(TINY, layers=7, heads=1, kv_heads=1, ffn=16, vocab=17)


@pytest.fixture
def slots():
    layout = Layout({}, {"w": (2, 3)})
    return Slots(layout, [torch.zeros(layout.numel) for _ in range(2)], cpu_streams())


def pieces(slots, value):
    """Host weights that are all `value`, in two pieces."""
    host = torch.full((slots.slots[0].buffer.numel(),), float(value))
    return [(host[:5], 0), (host[5:], 5)]


def test_MEM8_a_slot_is_copied_again_for_a_new_version_only(slots):
    slots.fetch(4, 0, pieces(slots, 1))
    slots.fetch(4, 0, pieces(slots, 2))
    assert (slots.weights(4).flat == 1).all()
    slots.fetch(4, 1, pieces(slots, 3))
    assert (slots.weights(4).flat == 3).all()


def test_MEM8_a_slot_knows_which_layer_it_holds(slots):
    for unit in (0, 1, 2):
        slots.fetch(unit, 0, pieces(slots, unit))
    assert (slots.weights(1).view("w") == 1).all() and (slots.weights(2).view("w") == 2).all()
    slots.fetch(0, 0, pieces(slots, 0))
    assert (slots.weights(0).flat == 0).all()


def test_MEM8_the_next_copy_waits_for_the_last_reader():
    layout = Layout({}, {"w": (64,)})
    with late_streams(compute=0.02, poison=True) as streams:
        slots, seen = Slots(layout, [torch.zeros(layout.numel)], streams), []
        for unit in range(3):
            slots.fetch(unit, 0, pieces(slots, unit))
            streams.compute.wait(slots.ready(unit))
            for _ in range(2):
                streams.compute.run(lambda unit=unit: seen.append(slots.weights(unit).flat.unique().tolist()))
            slots.release(unit)
    assert seen == [[0.0], [0.0], [1.0], [1.0], [2.0], [2.0]]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_MEM8_loading_weights_leaves_no_old_ones_in_a_slot(layers):
    c = dataclasses.replace(TINY, layers=layers)
    step = batches(c, 1)[0]
    with trainer(c, seed=1) as other:
        loss, saved = other.engine.evaluate(step), records(other)
    with trainer(c, seed=0) as made:
        assert made.engine.evaluate(step) != loss
        made.load(saved, 0)
        assert made.engine.evaluate(step) == loss
        made.state.initialize(0)
        assert made.engine.evaluate(step) != loss


def test_MEM8_evaluating_between_steps_changes_no_bit_and_reads_settled_weights():
    steps = batches(TINY, 3)
    with trainer(TINY) as made:
        plain, end = losses(train(made, steps)), masters(made)
    with late_streams(seed=0, compute=0.001, h2d=0.003, d2h=0.003, poison=True) as streams, \
         trainer(TINY, streams=streams) as made:
        seen = []
        for step in steps:
            # the loss that training is about to report
            seen.append(made.engine.evaluate(step) / supervised(step))
            seen.append(made.step(step, supervised(step)).loss)
        assert seen == [loss for loss in plain for _ in range(2)]
        assert same(masters(made), end)


@pytest.mark.parametrize("slots", [2, 3])
def test_NUM5_copies_late_at_random_change_no_bit(slots):
    step = batches(SMALL, 1, rows=1, T=8)[0]

    def step_and_forward(streams):
        with trainer(SMALL, T=8, rows=1, slots=slots, streams=streams) as made:
            result = made.step(step, supervised(step))
            return result.loss, result.grad_norm, made.engine.evaluate(step), masters(made)
    *numbers, end = step_and_forward(cpu_streams())
    for seed in range(100):
        with late_streams(seed=seed, compute=0.0002, h2d=0.0005, d2h=0.0005, poison=True) as streams:
            *late_numbers, late_end = step_and_forward(streams)
        assert late_numbers == numbers and same(late_end, end), f"seed {seed}"
