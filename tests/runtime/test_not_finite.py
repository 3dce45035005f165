"""What is not finite changes nothing, to the byte, and is called by its name."""
import dataclasses
import math
from unittest import mock

import pytest
import torch

from model import reference
from runtime.optimizer import clip_factor
from tests.models import TINY, VARIANTS
from tests.runtime.make import batches, given_gradients, losses, masters, ops_with, same, state_bytes, supervised, train, trainer

ALL_KINDS = dataclasses.replace(VARIANTS["both"], layers=2)
BAD = [math.nan, math.inf, -math.inf]


def spoiling(c, spoil):
    """Gradients of 1e-3 everywhere; spoil[0], if set, is (unit, tensor, value) for the last element of that tensor."""
    def give(step, unit, grads):
        for name in grads.layout.tensors:
            grads.view(name).fill_(1e-3)
        if spoil[0] and spoil[0][0] == unit:
            grads.view(spoil[0][1]).view(-1)[-1] = spoil[0][2]
    return given_gradients(c, give)


def tensors_of(made):
    """(unit, tensor, how messages call it), each kind once."""
    kinds = [(0, "embedding "), (1, "layer 0 "), (len(made.state.layouts) - 1, "head ")]
    return [(unit, name, prefix + name) for unit, prefix in kinds for name in made.state.layouts[unit].tensors]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_NUM1_one_bad_element_of_any_tensor_changes_no_byte(precision):
    spoil = [None]
    with trainer(ALL_KINDS, precision=precision, kind="cosine", ops=spoiling(ALL_KINDS, spoil)) as made:
        step = batches(ALL_KINDS, 1)[0]
        train(made, [step])
        before, versions = state_bytes(made), list(made.state.updates)
        good_loss = made.engine.evaluate(step) / supervised(step)
        for unit, tensor, name in tensors_of(made):
            for value in BAD:
                spoil[0] = unit, tensor, value
                result = made.step(step, supervised(step))
                assert result.skipped and not result.partial and result.not_finite == [name]
                assert result.loss == good_loss, "the loss of a skipped step is that of its forward pass"
                assert state_bytes(made) == before, f"{name} {value}"
                assert made.state.updates == versions and made.state.applied_steps == 1
                assert result.lr == made.optimizer.adamw.schedule.at(1), "a skipped step is none of the schedule's"
        spoil[0] = None
        result = made.step(step, supervised(step))
        assert not result.skipped and not result.not_finite and made.state.applied_steps == 2
        assert state_bytes(made) != before


@pytest.mark.parametrize("clip", ["layer", "none"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_NUM1_without_a_global_norm_the_spoiled_unit_alone_is_left_out(precision, clip):
    spoil = [None]
    with trainer(ALL_KINDS, precision=precision, clip=clip, ops=spoiling(ALL_KINDS, spoil)) as made:
        step, units = batches(ALL_KINDS, 1)[0], range(len(made.state.layouts))
        for applied, (unit, tensor, name) in enumerate(tensors_of(made)):
            before = [state_bytes(made, u) for u in units]
            spoil[0] = unit, tensor, BAD[applied % len(BAD)]
            result = made.step(step, supervised(step))
            assert result.partial and not result.skipped and result.not_finite == [name]
            assert [u for u in units if state_bytes(made, u) == before[u]] == [unit]
            assert made.state.applied_steps == applied + 1


@pytest.mark.parametrize("clip", ["exact", "layer"])
def test_NUM1_every_bad_tensor_is_named(clip):
    def give(step, unit, grads):
        if unit in (1, 2):
            grads.view("norm1")[0] = math.nan
            grads.view("down")[0, 0] = math.inf
    with trainer(ALL_KINDS, clip=clip, ops=given_gradients(ALL_KINDS, give)) as made:
        result, = train(made, batches(ALL_KINDS, 1))
        assert result.not_finite == ["layer 0 norm1", "layer 0 down", "layer 1 norm1", "layer 1 down"]


def test_NUM1_a_gradient_that_only_its_rounding_makes_infinite():
    """Above the largest bf16, below the largest fp32: the update would read inf."""
    value = 3.4e38
    assert math.isfinite(torch.tensor(value)) and not math.isfinite(torch.tensor(value).bfloat16())
    spoil = [(1, "down", value)]
    with trainer(ALL_KINDS, precision="bf16", ops=spoiling(ALL_KINDS, spoil)) as made:
        before = state_bytes(made)
        result, = train(made, batches(ALL_KINDS, 1))
        assert result.skipped and result.not_finite == ["layer 0 down"]
        assert state_bytes(made) == before


def spoiled_loss(c, at, value, kind):
    """The reference's operations, whose head makes the loss `value` in step `at`: by one logit, or while its gradient
    stays finite."""
    calls = iter(range(1 << 30))
    logsumexp = torch.logsumexp

    def linear_cross_entropy(x, w, labels, *rest, losses, **more):
        supervised_row = (labels >= 0).nonzero()[0]

        def one_logit(scores, dim):
            scores[supervised_row, 5] = value
            return logsumexp(scores, dim)
        now = next(calls) == at
        with mock.patch.object(torch, "logsumexp", one_logit if now and kind == "logit" else logsumexp):
            reference.linear_cross_entropy(x, w, labels, *rest, losses=losses, **more)
        if now and kind == "loss alone":
            losses[supervised_row] = value
    return ops_with(linear_cross_entropy=linear_cross_entropy)


@pytest.mark.parametrize("clip", ["exact", "layer", "none"])
@pytest.mark.parametrize("kind", ["logit", "loss alone"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_LOSS8_a_loss_that_is_not_finite_is_not_stepped(value, kind, clip):
    """Step 3 of 5: the weights after step 5 are those of a run over batches 1 2 4 5."""
    c = dataclasses.replace(TINY, layers=2)
    steps = batches(c, 5, rows=1)
    settings = dict(rows=1, clip=clip, kind="cosine")
    with trainer(c, **settings) as made:
        expected, end = train(made, [*steps[:2], *steps[3:]]), masters(made)
    with trainer(c, ops=spoiled_loss(c, 2, value, kind), **settings) as made:
        results = train(made, steps[:2])
        before, versions = state_bytes(made), list(made.state.updates)
        bad, = train(made, steps[2:3])
        assert bad.skipped and not bad.partial and not math.isfinite(bad.loss)
        assert bad.not_finite[0] == "loss" and (kind == "logit" or bad.not_finite == ["loss"])
        assert state_bytes(made) == before and made.state.updates == versions and made.state.applied_steps == 2
        results += train(made, steps[3:])
        assert losses(results) == losses(expected) and [r.lr for r in results] == [r.lr for r in expected]
        assert same(masters(made), end)


def test_the_clip_factor_is_never_above_one_nor_below_zero():
    for norm in (0.0, 1e-30, 0.5, 1.0, 10.0, 1e30, 1e300):
        assert 0 < clip_factor(norm, 1.0) <= 1
