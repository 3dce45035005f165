"""AdamW as the engine applies it: one step counter, this step's gradient, this step's learning rate."""
import dataclasses

import numpy as np
import pytest
import torch

from model import reference
from runtime import optimizer
from runtime.optimizer import RANGE, AdamW
from tests.judge import judge
from tests.models import TINY, packed
from tests.oracle import numpy_adamw
from tests.runtime.make import (
    HAND,
    all_equal,
    batches,
    case,
    fill,
    given_gradients,
    masters,
    ops_with,
    state_bytes,
    train,
    trainer,
    weights,
)

ONE_LAYER = dataclasses.replace(TINY, layers=1)
FIVE_LAYERS = dataclasses.replace(TINY, layers=5, ffn=16, vocab=17)


def copy_layer(made, source, targets):
    record = {name: t.clone() for name, t in made.state.record(source).items()}
    for unit in targets:
        made.state.load_record(unit, record)


@pytest.mark.parametrize(("threads", "block"), [(1, RANGE), (4, 1000)])
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_OPT5_one_step_counter(order, threads, block, monkeypatch):
    """Five equal layers with equal gradients stay equal for 50 steps, and equal numpy's arithmetic. With exact clipping
    updates go from the first layer to the last, without clipping from the last to the first."""
    monkeypatch.setattr(optimizer, "RANGE", block)
    layers, rng = range(1, 6), np.random.default_rng(0)
    drawn = {}

    def give(step, unit, grads):
        if unit in layers:
            if step not in drawn:
                drawn[step] = torch.from_numpy(rng.standard_normal(grads.layout.numel, np.float32)).bfloat16().float()
            for name, span in grads.layout.tensors.items():
                grads.view(name).view(-1).copy_(drawn[step][span.offset:span.end])
    clip = dict(clip="exact", max_norm=1e30) if order == "forward" else dict(clip="none")
    ops = given_gradients(FIVE_LAYERS, give)
    with trainer(FIVE_LAYERS, T=8, rows=1, precision="bf16", threads=threads, ops=ops, **clip) as made:
        copy_layer(made, 1, layers)
        layout, adamw = made.state.layouts[1], made.optimizer.adamw
        w = made.state.master(1).numpy()
        m, v = np.zeros_like(w), np.zeros_like(w)
        step = batches(FIVE_LAYERS, 1, rows=1, T=8)
        for t in range(50):
            result, = train(made, step)
            assert not result.skipped
            first = state_bytes(made, 1)
            assert all(state_bytes(made, unit) == first for unit in layers), f"layers differ after step {t + 1}"
            for part, decay in ((slice(0, layout.decay_from), 0.0), (slice(layout.decay_from, None), adamw.weight_decay)):
                numpy_adamw(w[part], m[part], v[part], drawn[t].numpy()[part], 1.0, adamw.schedule.at(t), adamw.beta1,
                            adamw.beta2, adamw.eps, decay, t + 1)
        ours, right = weights(made, 3), layout.bind(torch.from_numpy(w))
        for name in layout.tensors:
            assert torch.equal(ours.view(name), right.view(name)), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_OPT6_no_gradient_this_step(tied):
    """An embedding row that step 1 uses and step 2 does not."""
    right = case("adamw")["zero_gradient"]["right"]
    c = dataclasses.replace(ONE_LAYER, tied=tied)

    def embedding_backward(dout, *args, **rest):
        reference.embedding_backward(torch.ones_like(dout), *args, **rest)

    def linear_cross_entropy(*args, dw_addr=None, **rest):
        reference.linear_cross_entropy(*args, dw_addr=dw_addr, **rest)
        if dw_addr is not None:
            dw_addr.zero_()
    steps = [[packed([4], c.vocab, 0)] for _ in range(2)]
    for step, tokens in zip(steps, ([110, 6, 7, 8], [6, 6, 7, 7]), strict=True):
        step[0].tokens[:] = tokens
        step[0].order[:] = range(4)
    ops = ops_with(embedding_backward=embedding_backward, linear_cross_entropy=linear_cross_entropy)
    peer = torch.nn.Parameter(torch.ones(c.hidden))
    torch_adamw = torch.optim.AdamW([peer], lr=HAND["lr"], betas=(0.9, 0.999), weight_decay=0.0)
    with trainer(c, T=4, rows=1, ops=ops, **HAND) as made:
        fill(made, 1.0, units=[0])
        for step, gradient, exact in zip(steps, (1.0, 0.0), right, strict=True):
            train(made, [step])
            peer.grad = torch.full_like(peer, gradient)
            torch_adamw.step()
            row = weights(made, 0).view("embedding")[110]
            judge(row, exact=torch.full_like(row, exact, dtype=torch.float64), peer=peer.detach())


@dataclasses.dataclass(frozen=True)
class Listed:
    """A schedule that is a list."""
    rates: tuple[float, ...]

    def at(self, step):
        return self.rates[step]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_OPT9_learning_rate_reaches_the_kernel(precision):
    with trainer(TINY, precision=precision, weight_decay=0.0) as made:
        made.optimizer.adamw = AdamW(Listed((1e-3, 0.0, 1e-3)), weight_decay=0.0)
        for step, rate in zip(batches(TINY, 3), (1e-3, 0.0, 1e-3), strict=True):
            before = masters(made)
            result, = train(made, [step])
            assert result.lr == rate
            assert [torch.equal(a, b) for a, b in zip(before, masters(made), strict=True)] == [rate == 0.0] * len(before)


def test_OPT12_small_steps_survive():
    """A hundred steps, each too small for bf16: the master is fp32 AdamW's, the working weight its nearest bf16."""
    small = case("adamw")["small_steps"]
    settings = HAND | dict(lr=small["lr"])
    ops = given_gradients(ONE_LAYER, all_equal([small["gradient"]] * small["steps"]))
    w, m, v = np.ones(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    g = torch.tensor([small["gradient"]]).bfloat16().float().numpy()
    with trainer(ONE_LAYER, T=4, rows=1, precision="bf16", ops=ops, **settings) as made:
        fill(made, 1.0)
        train(made, batches(ONE_LAYER, 1, rows=1, T=4) * small["steps"])
        for t in range(small["steps"]):
            numpy_adamw(w, m, v, g, 1.0, small["lr"], 0.9, 0.999, 1e-8, 0.0, t + 1)
        # each step is right to half an ulp of 1, and a hundred add up
        assert abs(float(w[0]) - small["right"]) <= small["steps"] * np.spacing(np.float32(1)) / 2
        for unit, layout in enumerate(made.state.layouts):
            for name, span in layout.tensors.items():
                master = weights(made, unit).view(name)
                assert torch.equal(master, torch.full_like(master, w[0].item())), f"{unit} {name}"
                assert torch.equal(made.state.units[unit].masters[0][span.offset:span.end], master.flatten().bfloat16())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_OPT13_decay(precision):
    """Gradients of 0: matrices shrink to 0.99 of themselves, norms and biases stay; a skipped step decays nothing."""
    c = dataclasses.replace(ONE_LAYER, qk_norm=True, qkv_bias=True)
    ops = given_gradients(c, all_equal([0.0, float("nan")]))
    with trainer(c, precision=precision, lr=0.1, weight_decay=0.1, ops=ops) as made:
        # a bias that is 0 would stay anyway
        made.state.load_record(1, {name: torch.full_like(t, 3.0 if name == "master.qkv_bias" else 0.0) if "bias" in name else t
                                   for name, t in made.state.record(1).items()})
        units = range(len(made.state.layouts))
        before = [weights(made, unit) for unit in units]
        steps = batches(c, 2)
        train(made, steps[:1])
        for unit in units:
            after = weights(made, unit)
            for name, span in after.layout.tensors.items():
                factor = np.float32(1.0 if len(span.shape) == 1 else 0.99)
                assert torch.equal(after.view(name), before[unit].view(name) * factor), f"{unit} {name}"
        left = state_bytes(made)
        skipped, = train(made, steps[1:])
        assert skipped.skipped and state_bytes(made) == left
