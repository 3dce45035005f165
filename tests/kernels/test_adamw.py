"""AdamW on the device: every bit as plain fp32 operations one by one, and as the host's update."""
import numpy as np
import pytest
import torch

from kernels.adamw import adamw, adamw_ref
from runtime.host_adamw import adamw_step, join, split, update

F32 = np.float32
# the interpreter's numpy says so where a gradient's square becomes inf, as it is meant to
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def hard_state(n: int):
    """Masters, moments and gradients [n] fp32 with zeros of both signs, subnormals, ties, huge and tiny gradients."""
    rng = np.random.default_rng()
    w = (rng.standard_normal(n) * 0.02).astype(F32)
    special = np.array([0.0, -0.0, 1e-45, -1e-39, 1.1754944e-38, 1.0, 0.99999994, -1.0000001, 1.00390625, 1.01171875], F32)
    w[: special.size] = special[:n]
    m, v = (rng.standard_normal(n) * 1e-3).astype(F32), (rng.random(n) * 1e-6).astype(F32)
    m[-1], v[-1] = -0.0, 1e-42
    g = (rng.choice([-1.0, 1.0], n) * 10.0 ** rng.uniform(-30, 30, n)).astype(F32)
    g[: n // 3] = rng.standard_normal(n // 3) * 1e-3
    g[rng.integers(0, n, n // 8)] = -0.0
    return w, m, v, g


class Device:
    """The same state as the kernel takes it."""
    def __init__(self, w, m, v, g, is_split: bool, g_dtype: torch.dtype, device: str):
        n = w.size
        hi, lo = np.empty(n, np.int16), np.empty(n, np.int16)
        split(w, hi, lo)
        self.hi = torch.tensor(hi).view(torch.bfloat16).to(device) if is_split else torch.tensor(w, device=device)
        self.lo = torch.tensor(lo, device=device) if is_split else None
        self.m, self.v = torch.tensor(m, device=device), torch.tensor(v, device=device)
        self.g = torch.tensor(g).to(device, g_dtype)

    def step(self, factor: float, step) -> None:
        adamw(self.hi, self.lo, self.m, self.v, self.g, torch.tensor([factor], device=self.hi.device), step)

    def bits(self) -> np.ndarray:
        """[3, n] int32: master, m, v."""
        if self.lo is None:
            w = self.hi.cpu().numpy()
        else:
            w = np.empty(self.m.numel(), F32)
            join(self.hi.cpu().view(torch.int16).numpy(), self.lo.cpu().numpy(), w)
        return np.stack([w, self.m.cpu().numpy(), self.v.cpu().numpy()]).view(np.int32)


@pytest.mark.parametrize("n", [1, 1024, 2053])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_OPT4_steps_equal_plain_operations_in_every_bit(n, is_split, g_dtype, device):
    w, m, v, g = hard_state(n)
    ours = Device(w, m, v, g, is_split, g_dtype, device)
    state = [torch.from_numpy(x) for x in (w, m, v)]
    for t in range(1, 4):
        step = adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, t)
        ours.step(0.7, step)
        state = adamw_ref(*state, ours.g.cpu().float(), F32(0.7).item(), [x.item() for x in step])
        assert np.array_equal(ours.bits(), torch.stack(list(state)).numpy().view(np.int32)), f"step {t}"


def test_OPT9_the_learning_rate_of_each_step_is_the_one_applied(device):
    ours = Device(*hard_state(1500), True, torch.bfloat16, device)
    seen = [ours.bits()[0]]
    for t, lr in enumerate([1e-3, 0.0, 1e-3], 1):
        ours.step(1.0, adamw_step(lr, 0.9, 0.95, 1e-8, 0, t))
        seen.append(ours.bits()[0])
    moved = [(a != b).any() for a, b in zip(seen, seen[1:], strict=False)]
    assert moved == [True, False, True]


def test_OPT13_decay_alone_shrinks_weights(device):
    w = np.random.default_rng().standard_normal(700).astype(F32)
    zero = np.zeros(700, F32)
    ours = Device(w, zero, zero, zero, True, torch.bfloat16, device)
    ours.step(1.0, adamw_step(0.1, 0.9, 0.95, 1e-8, 0.1, 1))
    assert np.array_equal(ours.bits()[0], (F32(0.99) * w).view(np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_OPT5_device_and_host_give_the_same_bits(is_split, g_dtype):
    n = 1_000_003
    w, m, v, g = hard_state(n)
    ours = Device(w, m, v, g, is_split, g_dtype, "cuda")
    bits = ours.g.cpu().view(torch.int16).numpy() if g_dtype == torch.bfloat16 else g
    master = (w,)
    if is_split:
        master = np.empty(n, np.int16), np.empty(n, np.int16)
        split(w, *master)
    for t in range(1, 11):
        step = adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, t)
        ours.step(0.7, step)
        update(master, m, v, bits, F32(0.7), step, 0, n)
        if is_split:
            join(*master, w)
        assert np.array_equal(ours.bits(), np.stack([w, m, v]).view(np.int32)), f"step {t}"
