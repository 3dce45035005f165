"""What a checkpoint keeps of the state is enough: 5 + 5 steps equal 10, to the byte."""
import dataclasses
import math

import numpy as np
import pytest
import torch

from runtime import checkpoint
from runtime.optimizer import Schedule
from tests.judge import judge
from tests.models import TINY
from tests.runtime.make import (
    HAND,
    all_equal,
    batches,
    case,
    fill,
    given_gradients,
    records,
    state_bytes,
    train,
    trainer,
    weights,
)

ONE_LAYER = dataclasses.replace(TINY, layers=1)


def told(results):
    return [(r.loss, r.grad_norm, r.lr) for r in results]


@pytest.mark.parametrize("clip", ["exact", "layer"])
@pytest.mark.parametrize(("precision", "grads"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")])
def test_CKPT7_whole_equals_parts(precision, grads, clip):
    c = dataclasses.replace(TINY, layers=2)
    steps = batches(c, 10)
    settings = dict(precision=precision, grads=grads, clip=clip, kind="cosine", warmup=2, max_norm=0.5)
    with trainer(c, **settings) as made:
        whole, kept = [], {}
        for number, step in enumerate(steps, 1):
            whole += told(train(made, [step]))
            if number in (1, 5, 9):
                kept[number] = records(made)
        end = state_bytes(made)
    for first, saved in kept.items():
        # another seed: nothing of the new trainer's own weights may be left
        with trainer(c, seed=7, **settings) as made:
            made.load(saved, first)
            assert told(train(made, steps[first:])) == whole[first:], f"{first} + {10 - first}"
            assert state_bytes(made) == end, f"{first} + {10 - first}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_CKPT6_step_counter_and_moments(precision):
    """Two of the four gradients, then a new trainer: the third value is 0.894644793."""
    values = case("adamw")
    step = batches(ONE_LAYER, 1)
    peer = torch.nn.Parameter(torch.ones(1))
    torch_adamw = torch.optim.AdamW([peer], lr=HAND["lr"], betas=(0.9, 0.999), weight_decay=0.0)
    exact = []
    for gradient, right in zip(values["gradients"], values["right"], strict=True):
        peer.grad = torch.full_like(peer, gradient)
        torch_adamw.step()
        exact.append((right, peer.item()))

    def is_right(made, number):
        w = weights(made, 1).view("down")
        judge(w, exact=torch.full_like(w, exact[number][0], dtype=torch.float64), peer=torch.full_like(w, exact[number][1]))
    first, second = (given_gradients(ONE_LAYER, all_equal(part)) for part in (values["gradients"][:2], values["gradients"][2:]))
    with trainer(ONE_LAYER, precision=precision, ops=first, **HAND) as made:
        fill(made, 1.0)
        train(made, step * 2)
        is_right(made, 1)
        saved, applied = records(made), made.state.applied_steps
    with trainer(ONE_LAYER, precision=precision, ops=second, **HAND) as made:
        made.load(saved, applied)
        for number in (2, 3):
            train(made, step)
            is_right(made, number)


def test_CKPT8_schedule_list():
    """1e-5 falling linearly to 0 in 10 steps: 10, 9, ... 1 e-6; step 6 uses 5e-6."""
    schedule = Schedule("linear", 1e-5, 0, 10)
    assert [round(schedule.at(t) * 1e6, 9) for t in range(11)] == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd", "constant"])
def test_CKPT8_a_schedule_warms_up_once_and_never_rises_again(kind):
    schedule = Schedule(kind, 1.0, 4, 20, floor=0.1)
    rates = [schedule.at(t) for t in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a >= b for a, b in zip(rates[4:], rates[5:], strict=False)) and min(rates) >= 0.1
    assert rates[20:] == [1.0] * 5 if kind == "constant" else all(math.isclose(rate, 0.1) for rate in rates[20:])


def test_CKPT8_the_rates_of_a_run_that_stopped_and_skipped_are_the_schedules():
    c, steps = ONE_LAYER, batches(ONE_LAYER, 1)
    settings = dict(lr=1e-5, kind="linear", warmup=0, steps=10)
    # the third step is skipped: it uses no rate up
    values = [1e-3, 1e-3, math.nan, 1e-3, 1e-3, 1e-3]
    with trainer(c, ops=given_gradients(c, all_equal(values)), **settings) as made:
        rates = [r.lr for r in train(made, steps * 6) if not r.skipped]
        saved, applied = records(made), made.state.applied_steps
    assert applied == 5
    with trainer(c, **settings) as made:
        made.load(saved, applied)
        rates += [r.lr for r in train(made, steps * 5)]
    assert [round(rate * 1e6, 9) for rate in rates] == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_CKPT14_masters_are_saved_not_rebuilt(tmp_path):
    """1 + 2^-20 and 1 - 2^-12 have one working weight, 1.0; their bits survive two resumes on disk without a step."""
    cases = case("masters")
    values = torch.tensor([int(each["bits"], 16) for each in cases], dtype=torch.int32).view(torch.float32)

    def saved(made, step):
        return checkpoint.load(checkpoint.save(tmp_path, step, made.records(), {}))[1]
    with trainer(ONE_LAYER, precision="bf16") as made:
        record = {name: t.clone() for name, t in made.state.record(1).items()}
        for kind in ("master", "m", "v"):
            record[f"{kind}.down"].view(-1)[:2] = values
        made.state.load_record(1, record)
        start, on_disk = state_bytes(made), saved(made, 1)
    for step in (2, 3):
        with trainer(ONE_LAYER, precision="bf16", seed=step) as made:
            made.load(on_disk, 0)
            assert state_bytes(made) == start
            at = made.state.layouts[1].span("down").offset
            hi, lo = (t[at:at + 2] for t in made.state.units[1].masters)
            assert hi.tolist() == [each["working"] for each in cases]
            assert lo.tolist() == [each["lo"] for each in cases]
            on_disk = saved(made, step)
            for kind in ("master", "m", "v"):
                assert np.array_equal(on_disk["layer-0"][f"{kind}.down"].view(-1)[:2].view(torch.int32), values.view(torch.int32))
