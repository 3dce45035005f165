"""Slabs: pinned host buffers of one unit's gradients, and the two device buffers that gradients leave through.

    stage.free   recorded on d2h behind the copy      compute waits before it writes the stage again
    slab.ready   recorded on d2h behind the copy      the update waits for it, on the host
    slab.free    a host event, set by the update      the launcher waits before it queues the next copy into it

With exact clipping every gradient waits for the norm, so there is a slab for each unit; otherwise a few go round.
"""
import dataclasses
import threading
import time
from typing import Any

import torch

from runtime.streams import Streams


def _is_free() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclasses.dataclass
class Slab:
    """host: flat gradient, pinned, as (tensor, first element) pieces and as one tensor.
    verdict: pinned fp64 [3]: sum of squares, number of elements that are not finite, the step's loss."""
    flat: torch.Tensor
    pieces: list[tuple[torch.Tensor, int]]
    verdict: torch.Tensor
    ready: Any
    free: threading.Event = dataclasses.field(default_factory=_is_free)
    freed_at: float | None = None

    def release(self) -> None:
        """The update has read the gradient."""
        self.freed_at = time.perf_counter()
        self.free.set()


@dataclasses.dataclass
class Stage:
    """Device buffer of a rounded gradient on its way out."""
    buffer: torch.Tensor
    ready: Any
    free: Any


class Slabs:
    """Takes gradients from the device to the host, in order."""

    def __init__(self, slabs: list[Slab], stages: list[torch.Tensor], streams: Streams):
        self.slabs, self.streams = slabs, streams
        self.stages = [Stage(buffer, streams.event(), streams.event()) for buffer in stages]
        self._next_slab = self._next_stage = 0

    def stage(self) -> Stage:
        """The device buffer for the next gradient; its writer has to wait for `free`."""
        self._next_stage += 1
        return self.stages[self._next_stage % len(self.stages)]

    def send(self, stage: Stage, numel: int, verdict: torch.Tensor, what: str, stopped) -> Slab:
        """Queues the copy of `numel` elements of the stage, and of verdict fp64 [3], into the next slab, which it returns.

        Waits on the host only if that slab's gradient is still being read; `stopped()` raises if its reader has died.
        """
        slab = self.slabs[self._next_slab % len(self.slabs)]
        self._next_slab += 1
        while not slab.free.wait(timeout=0.2):
            stopped()
        slab.free.clear()
        compute, d2h = self.streams.compute, self.streams.d2h
        compute.record(stage.ready)
        d2h.wait(stage.ready)

        def copy():
            for host, begin in slab.pieces:
                end = min(begin + host.numel(), numel)
                if begin < end:
                    d2h.copy(host[: end - begin], stage.buffer[begin:end])
            d2h.copy(slab.verdict, verdict)
        d2h.span(what, copy, num_bytes=numel * stage.buffer.element_size())
        d2h.record(stage.free)
        d2h.record(slab.ready)
        return slab
