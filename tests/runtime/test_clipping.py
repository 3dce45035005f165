"""One norm over the whole gradient, before clipping; a factor that is never above 1."""
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tests.models import TINY
from tests.runtime.make import batches, given_gradients, state_bytes, train, trainer

UNTIED = dataclasses.replace(TINY, layers=2)
TIED = dataclasses.replace(UNTIED, tied=True)
# embedding, two layers, head; what holds a gradient of each
TENSORS = {0: "embedding", 1: "down", 2: "norm1", 3: "norm"}
PAIRS = list(itertools.combinations(TENSORS, 2))


def two_values(units, values):
    """The last element of a tensor of each unit; all else is 0."""
    def give(step, unit, grads):
        for at, value in zip(units, values, strict=True):
            if unit == at:
                grads.view(TENSORS[unit]).view(-1)[-1] = value
    return give


def seen_by_adamw(c, units, values, **settings):
    """The step's result, and what AdamW got in the place of `values`: with beta1 = 0 the first moment is it."""
    with trainer(c, ops=given_gradients(c, two_values(units, values)), beta1=0.0, **settings) as made:
        result, = train(made, batches(c, 1))
        state = made.state
        return result, [state.layouts[u].bind(state.units[u].m).view(TENSORS[u]).view(-1)[-1].item() for u in units]


@pytest.mark.parametrize("c", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("units", PAIRS)
def test_OPT10_clip(c, units):
    """Gradients 6 and 8 in any two places have norm 10, and become 0.59999994 and 0.79999992."""
    result, seen = seen_by_adamw(c, units, [6.0, 8.0])
    assert result.grad_norm == 10.0
    factor = np.float32(1 / (10 + 1e-6))
    assert seen == [np.float32(6) * factor, np.float32(8) * factor]
    assert seen == pytest.approx([0.59999994, 0.79999992], rel=1e-6)


@pytest.mark.parametrize("units", PAIRS)
def test_OPT10_a_norm_below_the_limit_is_left_alone(units):
    values = [float(np.float32(0.3)), float(np.float32(0.4))]
    result, seen = seen_by_adamw(UNTIED, units, values)
    assert np.float32(result.grad_norm) == np.float32(0.5)
    assert seen == values


def test_OPT10_layer_clipping_takes_each_units_own_norm():
    result, seen = seen_by_adamw(UNTIED, (1, 2), [6.0, 0.5], clip="layer")
    assert result.grad_norm == np.sqrt(36.25)
    assert np.float32(seen[0]) == np.float32(6.0) * np.float32(1 / (6 + 1e-6)) and seen[1] == 0.5


def test_OPT10_no_clipping_changes_nothing_and_still_reports_the_norm():
    result, seen = seen_by_adamw(UNTIED, (0, 3), [6.0, 8.0], clip="none")
    assert result.grad_norm == 10.0 and seen == [6.0, 8.0]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_OPT11_a_norm_that_is_not_a_number_skips_the_step(value):
    with trainer(TINY, ops=given_gradients(TINY, two_values((1, 0), [value, 1.0]))) as made:
        before = state_bytes(made)
        result, = train(made, batches(TINY, 1))
        assert result.skipped and not np.isfinite(result.grad_norm) and result.not_finite == ["layer 0 down"]
        assert state_bytes(made) == before and made.state.applied_steps == 0


def test_OPT11_a_norm_of_zero_is_a_step():
    """Factor 1: moments decay, the step counts, weights move by momentum alone."""
    def give(step, unit, grads):
        if step == 0:
            grads.flat.fill_(1e-3)
    with trainer(TINY, weight_decay=0.0, ops=given_gradients(TINY, give)) as made:
        first, = train(made, batches(TINY, 1))
        m = [u.m.clone() for u in made.state.units]
        second, = train(made, batches(TINY, 1))
        assert first.grad_norm > 0 and second.grad_norm == 0.0 and not second.skipped
        assert made.state.applied_steps == 2
        assert all(torch.equal(u.m, before * np.float32(0.9)) for u, before in zip(made.state.units, m, strict=True))
        assert all(t.isfinite().all() for u in made.state.units for t in (*u.masters, u.m, u.v))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_NUM2_a_huge_but_finite_norm(precision):
    """Four gradients of 1e20 have norm 2e20, and train: squared in fp32 they would be inf."""
    def give(step, unit, grads):
        if unit == 1:
            grads.view("down").view(-1)[:4] = 1e20
    with trainer(TINY, precision=precision, beta1=0.0, ops=given_gradients(TINY, give)) as made:
        result, = train(made, batches(TINY, 1))
        assert result.grad_norm == pytest.approx(2e20, rel=1e-6) and not result.skipped
        m = made.state.layouts[1].bind(made.state.units[1].m).view("down").view(-1)[:4]
        # half the limit each; a bf16 gradient is within 2^-8 of it
        assert torch.equal(m, torch.full_like(m, m[0].item())) and 0.498 < m[0].item() < 0.502
