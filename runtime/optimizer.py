"""AdamW on the host, layer by layer, on threads of its own beside the launcher.

With exact clipping the launcher reads the norm once, then hands over every unit in the order of the forward pass, and
goes on: the next forward waits, unit by unit, for `wait_updated`. With `layer` or `none` a unit is handed over as soon
as its gradient is on its way, and one of these threads waits for the copy and reads the unit's own norm.

Decay applies to matrices, not to norms and biases (the head of a flat buffer, up to layout.decay_from).
Source: Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, with decay scaled by the learning rate.
"""
import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from runtime.host_adamw import AdamWStep, adamw_step, update, warm_up
from runtime.slabs import Slab
from runtime.state import ModelState

# elements of a range: some 4 ms of one core
RANGE = 1 << 20
# Pascanu et al., arXiv 1211.5063, as torch.nn.utils.clip_grad_norm_ guards it
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate by optimizer step: linear warm-up, then cosine, constant, linear or WSD (arXiv 2404.06395).

    kind: cosine, constant, linear, wsd. floor: last learning rate as a share of `lr`. Steps that were skipped do not
    advance it. decay_share: part of the steps in which WSD falls linearly.
    """
    kind: str
    lr: float
    warmup: int
    steps: int
    floor: float = 0.0
    decay_share: float = 0.2

    def at(self, step: int) -> float:
        """Learning rate of the update that follows `step` updates (0 is the first)."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        left = max(self.steps - step, 0) / max(self.steps - self.warmup, 1)
        share = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 + math.cos(math.pi * (1 - left))),
                 "wsd": min(1.0, left / self.decay_share)}[self.kind]
        return self.lr * (self.floor + (1 - self.floor) * share)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Settings of the update, as people name them. clip: exact (one norm over the whole gradient), layer or none."""
    schedule: Schedule
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: str = "exact"
    max_norm: float = 1.0

    def step(self, applied: int, decay: bool) -> AdamWStep:
        """Numbers of update `applied` + 1, rounded once from fp64."""
        return adamw_step(self.schedule.at(applied), self.beta1, self.beta2, self.eps,
                          self.weight_decay if decay else 0.0, applied + 1)


def update_threads(cores: int) -> int:
    """How many threads update: the launcher and the thread that hands out ranges keep a core each, where there are some."""
    return max(1, cores - 2)


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied with: never above 1, and 1 for a norm of 0."""
    return min(1.0, max_norm / (norm + NORM_EPS))


@dataclasses.dataclass
class _Job:
    """A unit's update. factor: None: read the unit's own verdict, and the loss's, once they are here. applied: updates the
    model has had. left: ranges that are not through; began: when the first one was begun."""
    unit: int
    slab: Slab
    factor: float | None
    applied: int
    left: int = 0
    began: float = 0.0


class HostOptimizer:
    """Owns the updating threads. The launcher calls submit, wait_updated and settle; nobody else touches the state.

    One thread waits for gradients, in order, and cuts units into ranges; the others take ranges, whatever unit they are
    of, so that none waits for the slowest at a unit's end.
    """

    def __init__(self, state: ModelState, adamw: AdamW, threads: int, grad_dtype: torch.dtype):
        """threads: that update. grad_dtype: of the gradients in the slabs."""
        self.state, self.adamw = state, adamw
        self._bf16_gradients = grad_dtype == torch.bfloat16
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ranges: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._updated = [threading.Event() for _ in state.layouts]
        for event in self._updated:
            event.set()
        self._error: BaseException | None = None
        self._stopping = False
        # host time at which each unit's last update ended, and (unit, begin, end) of this step's updates
        self.updated_at = [0.0] * len(self._updated)
        self.spans: list[tuple[int, float, float]] = []
        # units whose update was left out, each with the tensors whose gradient was not finite
        self.left_out: dict[int, list[str]] = {}
        run = [self._hand_out] + [self._take] * threads
        self._threads = [threading.Thread(target=self._guarded, args=(fn,), name="adamw", daemon=True) for fn in run]
        for thread in self._threads:
            thread.start()

    def submit(self, unit: int, slab: Slab, factor: float | None, applied: int) -> None:
        """Queues the unit's update. factor: the clip factor, or None to let the unit's own norm decide.
        applied: updates the model has had before this one."""
        self._updated[unit].clear()
        self._jobs.put(_Job(unit, slab, factor, applied))

    def wait_updated(self, unit: int) -> None:
        """Blocks until the unit's last submitted update is through; raises what a thread died of."""
        while not self._updated[unit].wait(timeout=0.2):
            self.check()
        self.check()

    def settle(self) -> None:
        """Blocks until no update is running: what state holds is one step's."""
        for unit in range(len(self._updated)):
            self.wait_updated(unit)

    def take_spans(self) -> list[tuple[int, float, float]]:
        """(unit, begin, end) of the updates that ended since the last call."""
        spans, self.spans = self.spans, []
        return spans

    def check(self) -> None:
        """Raises what an updating thread died of, if it did."""
        if self._error is not None:
            raise RuntimeError(f"an updating thread stopped: {self._error!r}") from self._error

    def close(self) -> None:
        """Ends the threads, each after the range it is in; what is queued behind is dropped."""
        self._stop()
        for thread in self._threads:
            thread.join(timeout=10)

    def _stop(self) -> None:
        self._stopping = True
        self._jobs.put(None)
        for _ in self._threads:
            self._ranges.put(None)

    def _guarded(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        except BaseException as error:  # noqa: BLE001  the launcher raises it
            self._error = self._error or error
            self._stop()

    def _hand_out(self) -> None:
        # seconds, that otherwise the first step would take
        warm_up(len(self.state.units[0].masters) == 2, self._bf16_gradients)
        while (job := self._jobs.get()) is not None and not self._stopping:
            job.slab.ready.wait_host()
            factor = self._own_factor(job) if job.factor is None else job.factor
            job.began = time.perf_counter()
            if factor is None:
                self.left_out[job.unit] = self.state.not_finite(job.unit, job.slab.flat)
                self._through(job)
            else:
                self._cut(job, np.float32(factor))

    def _cut(self, job: _Job, factor: np.float32) -> None:
        """Queues the unit's ranges, those without decay first."""
        layout = self.state.layouts[job.unit]
        parts = [(0, layout.decay_from, self.adamw.step(job.applied, decay=False)),
                 (layout.decay_from, layout.numel, self.adamw.step(job.applied, decay=True))]
        ranges = [(job, factor, step, begin, min(begin + RANGE, last))
                  for first, last, step in parts for begin in range(first, last, RANGE)]
        job.left = len(ranges)
        for each in ranges:
            self._ranges.put(each)

    def _take(self) -> None:
        while (each := self._ranges.get()) is not None and not self._stopping:
            job = each[0]
            self._update(*each)
            with self._lock:
                job.left -= 1
                last = job.left == 0
            if last:
                self.state.updates[job.unit] += 1
                self._through(job)

    def _through(self, job: _Job) -> None:
        self.updated_at[job.unit] = time.perf_counter()
        self.spans.append((job.unit, job.began, self.updated_at[job.unit]))
        job.slab.release()
        self._updated[job.unit].set()

    def _own_factor(self, job: _Job) -> float | None:
        squares, not_finite, loss = job.slab.verdict.tolist()
        if not_finite or not math.isfinite(loss) or not math.isfinite(squares):
            return None
        return clip_factor(math.sqrt(squares), self.adamw.max_norm) if self.adamw.clip == "layer" else 1.0

    def _update(self, job: _Job, factor: np.float32, step: AdamWStep, begin: int, end: int) -> None:
        state = self.state.units[job.unit]
        masters = tuple(_array(t) for t in state.masters)
        update(masters, state.m.numpy(), state.v.numpy(), _array(job.slab.flat), factor, step, begin, end)


def _array(t: torch.Tensor) -> np.ndarray:
    """The tensor's memory; numpy knows no bf16, so its bits."""
    return t.view(torch.int16).numpy() if t.dtype == torch.bfloat16 else t.numpy()
