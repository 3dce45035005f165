"""Where a unit's state lies changes no bit: resident units beside streamed ones, in every mix and with every clipping."""
import dataclasses
import math

import pytest
import torch

from tests.late_streams import late_streams
from tests.models import TINY, VARIANTS
from tests.runtime.make import batches, given_gradients, losses, records, same, state_bytes, supervised, train, trainer

TIED = dataclasses.replace(TINY, tied=True)
UNITS = TINY.layers + 2


def trained(c, steps=3, **settings):
    """Losses, norms and all of the state after some steps, with an evaluation in between."""
    with trainer(c, **settings) as made:
        made_steps = batches(c, steps)
        results = train(made, made_steps[:1])
        evaluated = made.engine.evaluate(made_steps[0])
        results += train(made, made_steps[1:])
        return losses(results), [r.grad_norm for r in results], evaluated, state_bytes(made)


@pytest.mark.parametrize("clip", ["exact", "layer", "none"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("c", [TINY, TIED, VARIANTS["both"]], ids=["plain", "tied", "both"])
def test_OPT10_any_number_of_resident_units_gives_the_bits_of_none(c, precision, clip):
    settings = dict(precision=precision, clip=clip, max_norm=0.01, kind="cosine")
    host = trained(c, **settings)
    assert all(trained(c, resident=n, **settings) == host for n in range(1, UNITS + 1))


@pytest.mark.parametrize("clip", ["exact", "layer"])
@pytest.mark.parametrize("resident", [1, 3, UNITS])
def test_late_streams_change_no_bit(resident, clip):
    settings = dict(precision="bf16", clip=clip, resident=resident)
    on_time = trained(TINY, **settings)
    for late in ("compute", "h2d", "d2h"):
        with late_streams(**{late: 0.002}, poison=True) as streams:
            assert trained(TINY, streams=streams, **settings) == on_time, late


@pytest.mark.parametrize("resident", [2, UNITS])
def test_NUM1_a_bad_gradient_changes_no_byte_of_a_resident_unit(resident):
    def give(step, unit, grads):
        for name in grads.layout.tensors:
            grads.view(name).fill_(1e-3)
        if step == 1 and unit == 1:
            grads.view("down")[0, 0] = math.inf
    with trainer(TINY, resident=resident, ops=given_gradients(TINY, give)) as made:
        step = batches(TINY, 1)[0]
        train(made, [step])
        before, versions = state_bytes(made), list(made.state.updates)
        result = made.step(step, supervised(step))
        assert result.skipped and result.not_finite == ["layer 0 down"]
        assert state_bytes(made) == before and made.state.updates == versions


@pytest.mark.parametrize("clip", ["layer", "none"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_NUM1_without_a_global_norm_the_spoiled_resident_unit_alone_is_left_out(clip, bad):
    def give(step, unit, grads):
        for name in grads.layout.tensors:
            grads.view(name).fill_(1e-3)
        if unit == 1:
            grads.view("norm1")[0] = bad
    with trainer(TINY, resident=3, clip=clip, ops=given_gradients(TINY, give)) as made:
        before, versions = [state_bytes(made, u) for u in range(UNITS)], list(made.state.updates)
        result, = train(made, batches(TINY, 1))
        assert result.partial and not result.skipped and result.not_finite == ["layer 0 norm1"]
        assert [u for u in range(UNITS) if state_bytes(made, u) == before[u]] == [1]
        assert [after - v for after, v in zip(made.state.updates, versions, strict=True)] == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_checkpoint_of_one_mix_goes_on_in_another(precision):
    steps = batches(TINY, 4)
    with trainer(TINY, precision=precision) as made:
        train(made, steps)
        undisturbed = state_bytes(made)
    with trainer(TINY, precision=precision, resident=2) as made:
        train(made, steps[:2])
        saved, applied = records(made), made.state.applied_steps
    with trainer(TINY, precision=precision, resident=4, seed=7) as made:
        made.load(saved, applied)
        train(made, steps[2:])
        assert state_bytes(made) == undisturbed


def test_a_resident_unit_takes_no_host_memory_and_its_weights_never_cross_the_link():
    with trainer(TINY, precision="bf16", resident=UNITS) as made:
        assert set(made.memory.table) == {"batch"}
        result, = train(made, batches(TINY, 1))
        copied = {what for stream, what, *_ in result.times.timeline if stream in ("h2d", "d2h")}
        assert copied == {"batch"}
    with trainer(TINY, precision="bf16", resident=2) as made:
        _, result = train(made, batches(TINY, 2))
        copied = {what for stream, what, *_ in result.times.timeline if stream == "d2h"}
        assert copied == {"g2", "g3", "g4"}
        # the updates of the resident ones ran on compute, in front of their forward
        computed = [what for stream, what, *_ in result.times.timeline if stream == "compute"]
        assert computed.index("u0") < computed.index("E") < computed.index("u1") < computed.index("F0") and "u2" not in computed


def test_draws_are_the_same_wherever_they_lie():
    states = []
    for resident in (0, 2):
        with trainer(TINY, precision="bf16", resident=resident) as made:
            states.append([made.state.master(u).clone() for u in range(UNITS)])
    assert same(*states) and all(torch.isfinite(t).all() for t in states[0])
