"""Three streams and nothing else: compute, h2d, d2h. Events order them; the host waits for none of it.

    stream.run(fn, *args)     what fn launches goes to this stream
    stream.copy(dst, src)     asynchronous copy, pinned host memory on one side
    stream.record(event)      event fires when all before it is done
    stream.wait(event)        what follows waits for the event's last record
    stream.span(what, ...)    run, with its begin and end noted on the clock

On a CPU the streams are plain calls: everything is done when the call returns. Tests pass streams made of threads,
which delay what they like; so the engine may look at a result only after `wait_host`.
"""
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass
class Span:
    """A stretch of one stream's time. begin, end: marks of the clock. after: (cause, mark) of all it had to wait for.
    num_bytes: what a copy moved."""
    stream: str
    what: str
    begin: Any
    end: Any
    after: tuple[tuple[str, Any], ...] = ()
    num_bytes: int = 0


class CpuStream:
    """A stream for a machine without one: every call is finished when it returns."""

    def __init__(self, name: str, clock: "HostClock"):
        self.name, self.clock = name, clock

    def run(self, fn: Callable, *args) -> None:
        fn(*args)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def record(self, event: "CpuEvent") -> None:
        event.mark = self.clock.now()

    def wait(self, event: "CpuEvent") -> None:
        pass

    def span(self, what: str, fn: Callable, *args, after=(), num_bytes: int = 0) -> None:
        begin = self.clock.now()
        self.run(fn, *args)
        self.clock.spans.append(Span(self.name, what, begin, self.clock.now(), tuple(after), num_bytes))


class CpuEvent:
    """An event whose record is always in the past. mark: host seconds of the last record."""
    mark: float | None = None

    def wait_host(self) -> None:
        pass


class HostClock:
    """Marks are host seconds (time.perf_counter)."""

    def __init__(self):
        self.spans: list[Span] = []
        self.origin = self.now()

    def now(self) -> float:
        return time.perf_counter()

    def start(self) -> None:
        """Forgets the spans so far; times are counted from here."""
        self.spans, self.origin = [], self.now()

    def seconds(self, mark: float) -> float:
        """Seconds from start() to `mark`."""
        return mark - self.origin


class CudaStream:
    """A CUDA stream with begin and end events around each span."""

    def __init__(self, name: str, clock: "CudaClock", stream: torch.cuda.Stream):
        self.name, self.clock, self.stream = name, clock, stream

    def run(self, fn: Callable, *args) -> None:
        with torch.cuda.stream(self.stream):
            fn(*args)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            dst.copy_(src, non_blocking=True)

    def record(self, event: "CudaEvent") -> None:
        event.mark = self.clock.mark(self.stream)

    def wait(self, event: "CudaEvent") -> None:
        if event.mark is not None:
            self.stream.wait_event(event.mark)

    def span(self, what: str, fn: Callable, *args, after=(), num_bytes: int = 0) -> None:
        begin = self.clock.mark(self.stream)
        self.run(fn, *args)
        self.clock.spans.append(Span(self.name, what, begin, self.clock.mark(self.stream), tuple(after), num_bytes))


class CudaEvent:
    """The last record of an event: mark is a torch.cuda.Event, or None before the first."""
    mark: torch.cuda.Event | None = None

    def wait_host(self) -> None:
        """Blocks this thread, not the GPU, until the event has fired."""
        if self.mark is not None:
            self.mark.synchronize()


class CudaClock:
    """Marks are CUDA events with timing; a mark made by the host is a float, as in HostClock."""

    def __init__(self, compute: torch.cuda.Stream):
        self.compute = compute
        self.start()

    def now(self) -> float:
        return time.perf_counter()

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # a fresh one each time (1 us): who waits for an older record must not find a newer one in it
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def start(self) -> None:
        """Forgets the spans so far; times are counted from here, where the compute stream is idle."""
        self.spans: list[Span] = []
        self.origin_host = self.now()
        self.origin = self.mark(self.compute)

    def seconds(self, mark: torch.cuda.Event | float) -> float:
        """Seconds from start() to `mark`, which must have fired."""
        if isinstance(mark, float):
            return mark - self.origin_host
        return self.origin.elapsed_time(mark) * 1e-3


@dataclasses.dataclass
class Streams:
    """The three streams of a device, their clock, and how to make an event for them."""
    compute: Any
    h2d: Any
    d2h: Any
    clock: Any
    event: Callable[[], Any]


def cpu_streams() -> Streams:
    clock = HostClock()
    return Streams(*(CpuStream(name, clock) for name in ("compute", "h2d", "d2h")), clock, CpuEvent)


def cuda_streams() -> Streams:
    """Streams of the current GPU; none of them is the default stream, which would wait for all."""
    made = [torch.cuda.Stream() for _ in range(3)]
    clock = CudaClock(made[0])
    return Streams(*(CudaStream(name, clock, s) for name, s in zip(("compute", "h2d", "d2h"), made, strict=True)), clock, CudaEvent)
