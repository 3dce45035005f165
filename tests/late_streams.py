"""Streams made of threads: each runs what it is given in order, as late as a test likes. They behave as CUDA's do, so
what the engine forgets to order shows on a CPU.

    run, copy   queued; their arguments are read when their turn comes, as the GPU reads memory
    record      the event's mark fires when all before it is done; a later record makes a new mark
    wait        for the event's last record so far; an event that was never recorded holds nobody
    an error    ends the work of all three streams; the next call of one of them raises it, or the next wait_host

A copy's target holds NaN from the copy's turn until its end, and a stage holds NaN once it was copied out (`poison`).
"""
import contextlib
import dataclasses
import queue
import random
import threading
import time
from collections.abc import Iterator

import torch

from runtime.streams import HostClock, Span, Streams

# far above every delay: who waits that long waits for ever
TIMEOUT_S = 30.0


class Mark(threading.Event):
    """One record of an event. at: host seconds at which it fired."""
    at: float

    def fire(self) -> None:
        self.at = time.perf_counter()
        self.set()

    def wait_fired(self) -> None:
        if not self.wait(TIMEOUT_S):
            raise TimeoutError("an event never fired")


@dataclasses.dataclass
class Fault:
    """What the streams share: the first error of any of them."""
    error: BaseException | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class LateEvent:
    """mark: that of the last record, or None before the first."""
    mark: Mark | None = None

    def __init__(self, fault: Fault):
        self._fault = fault

    def wait_host(self) -> None:
        if self.mark is not None:
            self.mark.wait_fired()
        self._fault.check()


class LateClock(HostClock):
    """Marks are host seconds, or a stream's Mark that has fired."""

    def seconds(self, mark: float | Mark) -> float:
        return super().seconds(mark.at if isinstance(mark, Mark) else mark)


class LateStream:
    """A FIFO of calls on a thread; delay() seconds pass before each copy or kernel."""

    def __init__(self, name: str, clock: LateClock, fault: Fault, delay, poison: bool):
        self.name, self.clock, self.delay, self.poison = name, clock, delay, poison
        self._fault = fault
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"late {name}", daemon=True)
        self._thread.start()

    def run(self, fn, *args) -> None:
        self._queue(self._late, fn, args)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._queue(self._copy, dst, src)

    def record(self, event: LateEvent) -> None:
        event.mark = self._mark()

    def wait(self, event: LateEvent) -> None:
        if event.mark is not None:
            self._queue(event.mark.wait_fired)

    def span(self, what, fn, *args, after=(), num_bytes=0) -> None:
        begin = self._mark()
        if self.name == "compute":
            self.run(fn, *args)
        else:
            # it calls copy, which queues by itself
            fn(*args)
        self.clock.spans.append(Span(self.name, what, begin, self._mark(), tuple(after), num_bytes))

    def close(self) -> None:
        """Ends the thread behind what is queued."""
        self._calls.put(None)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self.name}: its thread does not end"

    def _mark(self) -> Mark:
        mark = Mark()
        self._queue(mark.fire)
        return mark

    def _queue(self, fn, *args) -> None:
        self._fault.check()
        self._calls.put((fn, args))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            fn, args = call
            # marks fire even so: nobody shall wait for what will not be done
            if self._fault.error is None or getattr(fn, "__func__", None) is Mark.fire:
                try:
                    fn(*args)
                except BaseException as error:  # noqa: BLE001  the launcher raises it
                    self._fault.error = self._fault.error or error

    def _late(self, fn, args) -> None:
        time.sleep(self.delay())
        fn(*args)

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert dst.dtype == src.dtype and dst.shape == src.shape, "a copy is one of bytes"
        if self.poison:
            fill_nan(dst)
        time.sleep(self.delay())
        dst.copy_(src)
        # verdicts, in fp64, leave twice
        if self.poison and self.name == "d2h" and src.dtype != torch.float64:
            fill_nan(src)


def fill_nan(t: torch.Tensor) -> None:
    """NaN in every float type; -1, which is no token and no position, in integers."""
    t.view(torch.uint8).fill_(255)


@contextlib.contextmanager
def late_streams(*, seed: int | None = None, compute=0.0, h2d=0.0, d2h=0.0, poison=False) -> Iterator[Streams]:
    """Streams whose calls take that many seconds longer, or with a seed at random up to that many; their threads end
    with the block. An error that nobody has seen is raised there."""
    clock, fault, streams = LateClock(), Fault(), []
    for name, longest in (("compute", compute), ("h2d", h2d), ("d2h", d2h)):
        share = random.Random(f"{name} {seed}").random if seed is not None else lambda: 1.0
        streams.append(LateStream(name, clock, fault, lambda share=share, longest=longest: longest * share(), poison))
    try:
        yield Streams(*streams, clock, lambda: LateEvent(fault))
    finally:
        for stream in streams:
            stream.close()
    fault.check()
