"""A gradient reaches the update by name, whatever the buffers held before."""
import dataclasses
import types

import numpy as np
import pytest
import torch

from model import reference
from model.layout import Layout
from runtime.engine import _zero_gaps
from runtime.optimizer import HostOptimizer
from runtime.slabs import Slab, Slabs
from runtime.state import UnitState
from runtime.streams import cpu_streams
from tests.models import TINY, VARIANTS
from tests.runtime.make import HAND, adamw, batches, case, gradients, losses, masters, same, train, trainer

KINDS = VARIANTS | {"tied": dataclasses.replace(TINY, tied=True)}


def test_OPT14_a_parameter_without_gradient_moves_nobody_elses():
    """Gradients of a and c, none of b, in a slab that holds 7 everywhere from its last user."""
    told, streams = case("slab"), cpu_streams()
    layout = Layout({}, {name: (size,) for name, size in told["tensors"]})
    buffer, stage, host = (torch.full((layout.numel,), told["slab_before"][0]) for _ in range(3))
    grads = layout.bind(buffer)
    _zero_gaps(grads)
    for name, gradient in told["gradients"].items():
        grads.view(name).copy_(torch.tensor(gradient) if gradient else torch.tensor(0.0))
    slab = Slab(host, [(host[:130], 0), (host[130:], 130)], torch.zeros(3, dtype=torch.float64), streams.event())
    slabs, verdict = Slabs([slab], [stage], streams), torch.zeros(3, dtype=torch.float64)
    reference.norm2(buffer, out=slabs.stage().buffer, partials=None, result=verdict[:2])
    slabs.send(slabs.stages[0], layout.numel, verdict, "g", stopped=lambda: None)

    read = layout.bind(slab.flat)
    assert torch.cat([read.view(name) for name, _ in told["tensors"]]).tolist() == told["right"]["slab"]
    assert all((slab.flat[begin:end] == 0).all() for begin, end in layout.gaps())
    assert slab.verdict.tolist() == [1 + 4 + 9 + 16, 0, 0]

    unit = UnitState((torch.full((layout.numel,), told["start"]),), torch.zeros(layout.numel), torch.zeros(layout.numel))
    state = types.SimpleNamespace(layouts=[layout], units=[unit], updates=[0])
    optimizer = HostOptimizer(state, adamw(**HAND | {"lr": told["lr"]}), 1, torch.float32)
    try:
        optimizer.submit(0, slab, 1.0, 0)
        optimizer.settle()
    finally:
        optimizer.close()
    w = layout.bind(unit.masters[0])
    for name, _ in told["tensors"]:
        assert w.view(name).numpy().tolist() == [np.float32(right) for right in told["right"][name]], name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("c", KINDS.values(), ids=KINDS)
def test_OPT14_what_the_buffers_held_before_changes_no_bit_and_padding_is_zero(c, precision):
    steps = batches(c, 2)
    with trainer(c, precision=precision) as made:
        expected, grads, end = losses(train(made, steps)), gradients(made), masters(made)
    with trainer(c, precision=precision) as made:
        seen = []
        for step in steps:
            buffers = made.engine.buffers
            for t in (buffers.grads, buffers.tied_grads, *buffers.stages, *(slab.flat for slab in made._slabs)):
                if t is not None:
                    t.fill_(7.0)
            seen += losses(train(made, [step]))
        assert seen == expected and same(masters(made), end)
        for layout, ours, theirs in zip(made.state.layouts, gradients(made), grads, strict=True):
            assert torch.equal(ours, theirs)
            assert all((ours[begin:end] == 0).all() for begin, end in layout.gaps())


def test_a_slab_that_is_still_read_is_not_written():
    """With one slab for five units, the launcher waits for the update that reads the one it wants."""
    with trainer(TINY, clip="layer") as made:
        expected, end = losses(train(made, batches(TINY, 3))), masters(made)
    with trainer(TINY, clip="layer") as made:
        made.engine.slabs.slabs = made._slabs[:1]
        assert losses(train(made, batches(TINY, 3))) == expected and same(masters(made), end)


def test_an_update_that_died_is_raised_where_the_launcher_waits():
    class Dies(HostOptimizer):
        def _update(self, *args):
            raise FloatingPointError("on purpose")
    for clip in ("exact", "layer"):
        with trainer(TINY, clip=clip, optimizer=Dies) as made, pytest.raises(RuntimeError, match="updating thread.*on purpose"):
            train(made, batches(TINY, 2))
