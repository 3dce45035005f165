"""However a step is cut into micro-batches, each supervised token counts once."""
import dataclasses

import pytest
import torch

from model import reference
from tests.models import TINY, packed
from tests.runtime.make import (
    batches,
    case,
    gradients,
    grouped,
    joined,
    losses,
    masked,
    masters,
    ops_with,
    relative_error,
    row_of,
    supervised,
    train,
    trainer,
)

SAME = 1e-6
# four documents of 8 tokens; 2, 1, 1 and 0 of their labels count: 3 and 1 in two micro-batches
DOCUMENTS = [([7, 3, 99, 12, 5, 64, 8, 21], [3, -100, -100, 5, -100, -100, -100, -100]),
             ([1, 2, 3, 4, 5, 6, 7, 8], [-100, -100, 4, -100, -100, -100, -100, -100]),
             ([30, 29, 28, 27, 26, 25, 24, 23], [-100, 28, -100, -100, -100, -100, -100, -100]),
             ([50, 51, 50, 51, 50, 51, 50, 51], [-100] * 8)]
LOSS = case("loss_3_and_1")
ROWS = {"packed": [row_of(DOCUMENTS[:2], 16), row_of(DOCUMENTS[2:], 16)],
        "padded": [row_of(DOCUMENTS[:2], 20), row_of(DOCUMENTS[2:], 20)],
        "one document a row": [row_of([document], 16) for document in DOCUMENTS]}
CUTS = [(kind, size) for kind, rows in ROWS.items() for size in (4, 2, 1) if size <= len(rows)]


def step_on(rows, micro_rows, ops=reference):
    """Loss, norm and gradients of one step on the rows of T tokens."""
    with trainer(TINY, T=len(rows[0].tokens), rows=len(rows), micro_rows=micro_rows, ops=ops) as made:
        result, = train(made, [grouped(rows, micro_rows)])
        return result.loss, result.grad_norm, gradients(made)


def losses_of_the_case():
    """The loss of each supervised token, in order, is the one that the case names."""
    given = iter([loss for part in LOSS["token_losses"] for loss in part])

    def linear_cross_entropy(x, w, labels, *rest, losses, **more):
        reference.linear_cross_entropy(x, w, labels, *rest, losses=losses, **more)
        for row in (labels >= 0).nonzero():
            losses[row] = next(given)
    return ops_with(linear_cross_entropy=linear_cross_entropy)


@pytest.mark.parametrize(("kind", "micro_rows"), CUTS)
def test_OPT1_token_weights(kind, micro_rows):
    """The mean is over the step's tokens, and so is the gradient: that of one micro-batch with all four."""
    assert step_on(ROWS[kind], micro_rows, losses_of_the_case())[0] == LOSS["right_mean"] == 3.5
    loss, norm, grads = step_on(ROWS[kind], micro_rows)
    whole_loss, whole_norm, whole = step_on(ROWS["packed"], 2)
    assert loss == pytest.approx(whole_loss, rel=SAME) and norm == pytest.approx(whole_norm, rel=SAME)
    for unit, (ours, theirs) in enumerate(zip(grads, whole, strict=True)):
        assert relative_error([ours], [theirs]) <= SAME, f"unit {unit}"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_OPT1_a_fully_masked_micro_batch_changes_nothing(place):
    rows = ROWS["packed"]
    among = [*rows[:place], masked(packed([9, 7], TINY.vocab, 5)), *rows[place:]]
    alone, more = step_on(rows, 1), step_on(among, 1)
    assert more[0] == alone[0]
    assert relative_error(more[2], alone[2]) <= SAME


def test_OPT2_every_micro_batch_counts():
    """Three steps of the same eight rows as 1, 2, 4 and 8 micro-batches."""
    steps = batches(TINY, 3, rows=8, T=12)
    runs = {}
    for size in (8, 4, 2, 1):
        # weights, unlike gradients, feel what eps hides: a rate at which one step moves them by little
        with trainer(TINY, T=12, rows=8, micro_rows=size, lr=1e-3) as made:
            results = train(made, [grouped(rows, size) for rows in steps])
            runs[size] = [r.grad_norm for r in results], masters(made)
    whole_norms, whole = runs.pop(8)
    for size, (norms, weights) in runs.items():
        assert norms == pytest.approx(whole_norms, rel=SAME), f"micro-batches of {size} rows"
        assert relative_error(weights, whole) <= SAME, f"micro-batches of {size} rows"


def test_OPT15_equal_micro_batches():
    row = packed([5, 11], TINY.vocab, 3, masked=0.2)
    loss, norm, grads = step_on([row], 1)
    for n in (2, 4, 8):
        more_loss, more_norm, more_grads = step_on([row] * n, 1)
        assert more_loss == pytest.approx(loss, rel=SAME) and more_norm == pytest.approx(norm, rel=SAME), f"{n} micro-batches"
        assert relative_error(more_grads, grads) <= SAME, f"{n} micro-batches"


def test_rows_in_one_micro_batch_do_not_see_each_other():
    first, second = packed([16], TINY.vocab, 0), packed([16], TINY.vocab, 1)
    other = dataclasses.replace(first, tokens=first.tokens[::-1].copy(), order=packed([16], TINY.vocab, 0).order)
    with trainer(TINY, T=16, rows=2, micro_rows=2) as made:
        seen = [made.engine.logits(joined([a, second]), 20) for a in (first, other)]
    assert torch.equal(*seen)


def test_LOSS1_logged_is_trained():
    """The loss of two micro-batches is neither their sum nor the mean of their means; each step has its norm."""
    with trainer(TINY, T=16, rows=2, ops=losses_of_the_case()) as made:
        result = made.step(ROWS["packed"], supervised(ROWS["packed"]))
    assert result.loss == LOSS["right_mean"]
    assert result.grad_norm > 0


def test_LOSS1_the_loss_is_that_of_the_weights_before_the_update():
    step = batches(TINY, 1)[0]
    with trainer(TINY) as made:
        before = made.engine.evaluate(step) / supervised(step)
        assert losses(train(made, [step])) == [before]
        assert made.engine.evaluate(step) / supervised(step) < before
