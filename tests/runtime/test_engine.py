"""The streamed engine against plain training, and against itself under every delay."""
import dataclasses

import pytest
import torch

from tests.late_streams import late_streams
from tests.models import TINY, VARIANTS
from tests.oracle import resident_loop
from tests.runtime.make import adamw, batches, masters, same, train, trainer

CONFIGS = {"plain": TINY, "tied": dataclasses.replace(TINY, tied=True), "both": VARIANTS["both"],
           "one layer": dataclasses.replace(TINY, layers=1), "seven layers": dataclasses.replace(TINY, layers=7)}


@pytest.mark.parametrize("micro_rows", [1, 2])
@pytest.mark.parametrize("c", CONFIGS.values(), ids=CONFIGS)
def test_streamed_equals_resident_bitwise(c, micro_rows):
    steps = batches(c, 3)
    if micro_rows == 2:
        steps = [[joined(step)] for step in steps]
    with trainer(c, micro_rows=micro_rows) as made:
        start = masters(made)
        results, end = train(made, steps), masters(made)
    losses, norms, expected = resident_loop(c, start, steps, adamw(), head_chunk=1024)
    assert [r.loss for r in results] == losses
    assert [r.grad_norm for r in results] == norms
    assert same(end, expected)


def joined(step):
    """Two micro-batches as one."""
    from tests.models import HostBatch
    a, b = (dataclasses.asdict(x) for x in step)
    import numpy as np
    n = len(a["tokens"])
    shifted = dict(b, doc_start=b["doc_start"] + n, doc_end=b["doc_end"] + n)
    both = {k: np.concatenate([a[k], shifted[k]]) for k in a}
    return HostBatch(**dict(both, order=np.argsort(both["tokens"], kind="stable").astype(np.int32)))
