"""Steps and micro-batches in which nothing is supervised."""
import math

import pytest
import torch

from model import reference
from runtime.telemetry import LossMean
from tests.models import TINY
from tests.runtime.make import batches, case, losses, masked, masters, ops_with, same, state_bytes, supervised, train, trainer


def test_LOSS2_a_micro_batch_without_supervision_adds_nothing():
    whole, empty = batches(TINY, 1, rows=2)[0]
    with trainer(TINY) as made:
        result, = train(made, [[whole, masked(empty)]])
        loss, weights = result.loss, masters(made)
    assert math.isfinite(loss) and not result.skipped and result.not_finite == []
    with trainer(TINY, rows=1) as made:
        alone, = train(made, [[whole]])
        assert alone.loss == loss and alone.grad_norm == pytest.approx(result.grad_norm, rel=1e-6)
        assert same(masters(made), weights)


@pytest.mark.parametrize("clip", ["exact", "layer"])
def test_LOSS2_a_step_without_supervision_is_refused_and_the_run_goes_on(clip):
    steps = batches(TINY, 3)
    with trainer(TINY, clip=clip) as made:
        expected, end = losses(train(made, [steps[0], steps[2]])), masters(made)
    with trainer(TINY, clip=clip) as made:
        seen = losses(train(made, steps[:1]))
        before = state_bytes(made)
        with pytest.raises(ValueError, match="no token of these micro-batches is supervised"):
            made.step([masked(b) for b in steps[1]], 0)
        assert state_bytes(made) == before and made.state.applied_steps == 1
        assert seen + losses(train(made, steps[2:])) == expected
        assert same(masters(made), end)


def test_LOSS10_an_empty_batch_is_no_loss_of_0():
    """Losses 3, none, 2, 1 of equally many tokens: the mean is 2.0, and three updates are made."""
    told = case("empty_step")
    given = iter([loss for loss in told["losses"] if loss is not None])

    def linear_cross_entropy(x, w, labels, *rest, losses, **more):
        reference.linear_cross_entropy(x, w, labels, *rest, losses=losses, **more)
        losses.copy_(torch.where(labels >= 0, next(given), 0.0))
    mean = LossMean()
    with trainer(TINY, rows=1, ops=ops_with(linear_cross_entropy=linear_cross_entropy)) as made:
        for step, tokens in zip(batches(TINY, 4, rows=1), told["supervised"], strict=True):
            step[0].labels[:] = [1] * tokens + [-100] * (24 - tokens)
            try:
                result = made.step(step, supervised(step))
            except ValueError as refused:
                assert tokens == 0 and "supervised" in str(refused)
                mean.add(None, tokens)
            else:
                mean.add(result.loss, tokens)
        assert made.state.applied_steps == 3
    assert mean.take() == told["right_mean"] == 2.0
