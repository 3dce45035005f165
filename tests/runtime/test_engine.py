"""The streamed engine against plain training."""
import dataclasses

import pytest

from tests.models import TINY, VARIANTS
from tests.oracle import resident_loop
from tests.runtime.make import adamw, batches, grouped, masters, same, train, trainer

CONFIGS = {"plain": TINY, "tied": dataclasses.replace(TINY, tied=True), "both": VARIANTS["both"],
           "one layer": dataclasses.replace(TINY, layers=1), "seven layers": dataclasses.replace(TINY, layers=7)}


@pytest.mark.parametrize("micro_rows", [1, 2])
@pytest.mark.parametrize("c", CONFIGS.values(), ids=CONFIGS)
def test_streamed_equals_resident_bitwise(c, micro_rows):
    steps = batches(c, 3)
    if micro_rows == 2:
        steps = [grouped(step, 2) for step in steps]
    with trainer(c, micro_rows=micro_rows) as made:
        start = masters(made)
        results, end = train(made, steps), masters(made)
    losses, norms, expected = resident_loop(c, start, steps, adamw(), head_chunk=1024)
    assert [r.loss for r in results] == losses
    assert [r.grad_norm for r in results] == norms
    assert same(end, expected)
