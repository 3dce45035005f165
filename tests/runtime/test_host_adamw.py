"""Host AdamW: equal bit for bit to the same fp32 operations one by one in numpy, however the work is cut."""
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from runtime.host_adamw import AdamWStep, adamw_step, join, split, update
from tests.judge import judge

ROOT = pathlib.Path(__file__).parents[2]
CASES = json.loads((ROOT / "tests/cases/adamw.json").read_text())
HAND = (*CASES["betas"], CASES["eps"])
F32 = np.float32
ONE = F32(1)


def adamw_in_numpy(w, m, v, g, factor: F32, step: AdamWStep):
    """One step, one rounding an operation; fp32 arrays in and out."""
    with np.errstate(over="ignore", under="ignore"):
        x = g * factor
        m = step.beta1 * m + step.one_minus_beta1 * x
        v = step.beta2 * v + step.one_minus_beta2 * (x * x)
        return step.decay * w - step.rate * (m / (np.sqrt(v) * step.rbc2 + step.eps)), m, v


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy()


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.int32) << 16).view(F32)


class State:
    """Masters (split or whole), moments, and the two things a test does with them."""
    def __init__(self, w: np.ndarray, is_split: bool):
        self.master = (w.copy(),)
        if is_split:
            self.master = np.empty(w.size, np.int16), np.empty(w.size, np.int16)
            split(w, *self.master)
        self.m, self.v = np.zeros_like(w), np.zeros_like(w)

    def step(self, g, step, factor=ONE, begin=0, end=None):
        update(self.master, self.m, self.v, g, factor, step, begin, self.m.size if end is None else end)

    @property
    def w(self) -> np.ndarray:
        if len(self.master) == 1:
            return self.master[0]
        out = np.empty_like(self.m)
        join(*self.master, out)
        return out

    def bits(self) -> np.ndarray:
        return np.stack([self.w, self.m, self.v]).view(np.int32)


def hard_masters(n: int, rng) -> np.ndarray:
    """Weights as a model has them, and zeros of both signs, subnormals, ties of the split and neighbours of 1."""
    w = (rng.standard_normal(n) * 0.02).astype(F32)
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1.1754942e-38, 1.1754944e-38, 1.0, 0.99999994, -1.0000001, 1.00390625,
               1.01171875, 2.0, -0.5, 3e38]
    w[: len(special)] = special
    return w


def hard_gradients(n: int, rng) -> np.ndarray:
    """Of every size from 1e-30 to 1e30, some exactly zero, of both signs."""
    g = (rng.choice([-1.0, 1.0], n) * 10.0 ** rng.uniform(-30, 30, n)).astype(F32)
    g[rng.integers(0, n, n // 8)] = 0.0
    g[rng.integers(0, n, n // 8)] = -0.0
    return g


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize(("weight_decay", "right"), [(0.0, "right"), (0.1, "right_with_decay_0_1")])
def test_OPT4_four_steps_give_the_values_worked_out_by_hand(is_split, weight_decay, right):
    ours = State(np.full(1, CASES["start"], F32), is_split)
    theirs = torch.nn.Parameter(torch.tensor([CASES["start"]]))
    peer = torch.optim.AdamW([theirs], lr=CASES["lr"], betas=CASES["betas"], eps=CASES["eps"], weight_decay=weight_decay)
    for t, (gradient, exact) in enumerate(zip(CASES["gradients"], CASES[right], strict=True), 1):
        ours.step(bf16_bits(np.full(1, gradient, F32)), adamw_step(CASES["lr"], *HAND, weight_decay, t))
        theirs.grad = torch.tensor([gradient])
        peer.step()
        judge(torch.from_numpy(ours.w), exact=torch.tensor([exact], dtype=torch.float64), peer=theirs.detach())


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("bf16_gradient", [True, False], ids=["bf16", "fp32"])
def test_OPT4_a_thousand_steps_equal_numpy_in_every_bit(is_split, bf16_gradient):
    rng = np.random.default_rng()
    n = 2053
    w = hard_masters(n, rng)
    m, v = np.zeros(n, F32), np.zeros(n, F32)
    ours, crossed, overflowed = State(w, is_split), np.zeros(n, bool), False
    for t in range(1, 1001):
        g = hard_gradients(n, rng)
        # a third of the parameters sees gradients as training has them
        g[: n // 3] = rng.standard_normal(n // 3) * 1e-3
        bits = bf16_bits(g) if bf16_gradient else g
        step, factor = adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, t), F32(rng.uniform(0.1, 1))
        ours.step(bits, step, factor)
        before = np.frexp(w)[1]
        w, m, v = adamw_in_numpy(w, m, v, widened(bits) if bf16_gradient else g, factor, step)
        crossed |= before != np.frexp(w)[1]
        overflowed |= bool(np.isinf(v).any())
        if t % 100 == 0 or t < 10:
            assert np.array_equal(ours.bits(), np.stack([w, m, v]).view(np.int32)), f"step {t}"
    assert crossed[: n // 3].any() and overflowed, "the inputs were meant to be harder"


def test_OPT4_one_step_is_torchs_within_two_ulp():
    rng = np.random.default_rng()
    # weights well above the step of 1e-3: the error is the addition's, not the step's
    w, g = (rng.choice([-1, 1], 1000) * rng.uniform(0.01, 0.03, 1000)).astype(F32), rng.standard_normal(1000).astype(F32)
    ours, theirs = State(w, True), torch.nn.Parameter(torch.from_numpy(w.copy()))
    ours.step(g, adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 1))
    theirs.grad = torch.from_numpy(g)
    torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    ulp = np.spacing(np.maximum(np.abs(w), np.abs(ours.w)))
    assert (np.abs(ours.w - theirs.detach().numpy()) <= 2 * ulp).all()


def fifty_steps(threads: int, block: int, reverse: bool) -> str:
    """Digest of 5 identical layers after 50 steps; raises if they differ from each other after any of them."""
    n = 5003
    pool = ThreadPoolExecutor(threads)
    layers = [State(hard_masters(n, np.random.default_rng(0)), True) for _ in range(5)]
    rng = np.random.default_rng(1)
    for t in range(1, 51):
        g, step = bf16_bits(hard_gradients(n, rng)), adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, t)
        for layer in reversed(layers) if reverse else layers:
            begins = range(0, n, block)
            cuts = [(begin, min(begin + block, n)) for begin in (reversed(begins) if reverse else begins)]
            list(pool.map(lambda cut, layer=layer, g=g, step=step: layer.step(g, step, F32(0.5), *cut), cuts))
        first = layers[0].bits()
        assert all(np.array_equal(first, layer.bits()) for layer in layers[1:]), f"layers differ after step {t}"
    return hashlib.sha256(first.tobytes()).hexdigest()


def in_a_process(code: str, **env: str) -> subprocess.CompletedProcess:
    """numba decides once a process how many threads of what kind it has."""
    return subprocess.run([sys.executable, "-c", f"from tests.runtime.test_host_adamw import *; {code}"], cwd=ROOT,
                          env=os.environ | env, capture_output=True, text=True)


def test_OPT5_threads_blocks_and_order_change_no_bit():
    digest = fifty_steps(threads=1, block=5003, reverse=False)
    assert fifty_steps(threads=1, block=1000, reverse=True) == digest
    run = in_a_process("print(fifty_steps(4, 5003, False) + fifty_steps(4, 1000, True))", NUMBA_NUM_THREADS="4")
    assert run.stdout.strip() == 2 * digest, run.stderr


def test_update_from_a_thread_that_is_not_the_main_one_changes_no_bit():
    digest = fifty_steps(threads=1, block=5003, reverse=False)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(fifty_steps, 1, 2048, False).result() == digest


def test_elements_outside_the_range_are_left_alone():
    rng = np.random.default_rng()
    ours = State(hard_masters(5000, rng), True)
    before = ours.bits()
    ours.step(bf16_bits(hard_gradients(5000, rng)), adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 1), ONE, 777, 3001)
    changed = (before != ours.bits()).any(0)
    assert changed[777:3001].any() and not changed[:777].any() and not changed[3001:].any()


def test_OPT6_a_zero_gradient_lets_the_moments_decay():
    case = CASES["zero_gradient"]
    ours = State(np.ones(1, F32), True)
    theirs = torch.nn.Parameter(torch.ones(1))
    peer = torch.optim.AdamW([theirs], lr=CASES["lr"], betas=CASES["betas"], eps=CASES["eps"], weight_decay=0)
    for t, (gradient, exact) in enumerate(zip(case["gradients"], case["right"], strict=True), 1):
        ours.step(bf16_bits(np.full(1, gradient, F32)), adamw_step(CASES["lr"], *HAND, 0, t))
        theirs.grad = torch.tensor([gradient])
        peer.step()
        judge(torch.from_numpy(ours.w), exact=torch.tensor([exact], dtype=torch.float64), peer=theirs.detach())


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
def test_OPT9_the_learning_rate_of_each_step_is_the_one_applied(is_split):
    rng = np.random.default_rng()
    ours = State((rng.standard_normal(3000) * 0.02).astype(F32), is_split)
    seen = [ours.w.copy()]
    for t, lr in enumerate([1e-3, 0.0, 1e-3], 1):
        ours.step(rng.standard_normal(3000).astype(F32), adamw_step(lr, 0.9, 0.95, 1e-8, 0, t))
        seen.append(ours.w.copy())
    moved = [(a != b).any() for a, b in zip(seen, seen[1:], strict=False)]
    assert moved == [True, False, True]


def test_OPT12_steps_too_small_for_bf16_add_up_in_the_master():
    case = CASES["small_steps"]
    g = bf16_bits(np.full(1, case["gradient"], F32))
    ours, w, m, v = State(np.ones(1, F32), True), np.ones(1, F32), np.zeros(1, F32), np.zeros(1, F32)
    for t in range(1, case["steps"] + 1):
        step = adamw_step(case["lr"], *HAND, 0, t)
        ours.step(g, step)
        w, m, v = adamw_in_numpy(w, m, v, widened(g), ONE, step)
    assert np.array_equal(ours.w, w)
    assert np.array_equal(ours.master[0], bf16_bits(w))
    # each step is right to half an ulp of 1, and a hundred add up
    assert abs(float(w[0]) - case["right"]) <= case["steps"] * np.spacing(ONE) / 2


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
def test_OPT13_decay_shrinks_what_has_decay_and_nothing_else(is_split):
    w = np.random.default_rng().standard_normal(2000).astype(F32)
    ours = State(w, is_split)
    g = np.zeros(2000, np.int16)
    ours.step(g, adamw_step(0.1, 0.9, 0.95, 1e-8, 0.0, 1), ONE, 0, 500)
    ours.step(g, adamw_step(0.1, 0.9, 0.95, 1e-8, 0.1, 1), ONE, 500, 2000)
    assert np.array_equal(ours.w[:500], w[:500])
    assert np.array_equal(ours.w[500:], F32(0.99) * w[500:])


@pytest.mark.parametrize("n", [1, 1024, 70001])
def test_halves_join_to_the_same_bits_and_hi_is_the_nearest_bf16(n):
    rng = np.random.default_rng()
    bits = rng.integers(-2**31, 2**31, n, dtype=np.int64).astype(np.int32)
    hi, lo, back = np.empty(n, np.int16), np.empty(n, np.int16), np.empty(n, F32)
    split(bits.view(F32), hi, lo)
    join(hi, lo, back)
    assert np.array_equal(back.view(np.int32), bits)
    # away from ties torch rounds to the same bf16; its NaN is another one
    plain = ((bits & 0xFFFF) != 0x8000) & ~np.isnan(bits.view(F32))
    assert np.array_equal(hi[plain], bf16_bits(bits.view(F32))[plain])


def test_ties_round_away_from_zero():
    tie = np.array([0x3F808000, 0x3F818000, -0x40808000 + 0x10000], np.int64).astype(np.int32)
    hi, lo = np.empty(3, np.int16), np.empty(3, np.int16)
    split(tie.view(F32), hi, lo)
    assert (np.abs(widened(hi)) > np.abs(tie.view(F32))).all() and (lo == -0x8000).all()


def test_the_first_update_is_number_one():
    assert adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 1).rate == F32(1e-3 / (1 - 0.9))
    with pytest.raises(ValueError, match="t: 0"):
        adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 0)


def test_wrong_arrays_are_refused_by_name():
    f, i = np.zeros(64, F32), np.zeros(64, np.int16)
    step = adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 1)
    for master, m, v, g, end, name in (((i, f), f, f, i, 64, "lo"), ((f.astype(np.float64),), f, f, i, 64, "w"),
                                       ((i, i), f, f[:32], i, 64, "v"), ((i, i), f, f, f.astype(np.float16), 64, "g"),
                                       ((i, i), np.zeros(128, F32)[::2], f, i, 64, "m"), ((i, i), f, f, i[:32], 64, "end")):
        with pytest.raises(ValueError, match=name):
            update(master, m, v, g, ONE, step, 0, end)
