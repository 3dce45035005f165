"""Streams made of threads: each runs what it is given in order, as late as a test likes. They behave as CUDA's do, so
what the engine forgets to order shows on a CPU."""
import queue
import random
import threading
import time

from runtime.streams import HostClock, Streams


class LateEvent:
    """mark: threading.Event of the last record, or None before the first."""
    mark = None

    def wait_host(self):
        if self.mark is not None and not self.mark.wait(timeout=30):
            raise TimeoutError("an event never fired")


class LateStream:
    """A FIFO of calls on a thread. delay() seconds pass before each copy or kernel."""

    def __init__(self, name, delay):
        self.name, self.delay = name, delay
        self.error = None
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            call = self._calls.get()
            try:
                call()
            except BaseException as error:  # noqa: BLE001  shown by the next call
                self.error = self.error or error

    def _later(self, call):
        if self.error:
            raise self.error
        self._calls.put(call)

    def run(self, fn, *args):
        self._later(lambda: (time.sleep(self.delay()), fn(*args)))

    def copy(self, dst, src):
        self.run(dst.copy_, src)

    def record(self, event):
        mark = event.mark = threading.Event()
        self._later(mark.set)

    def wait(self, event):
        mark = event.mark
        if mark is not None:
            self._later(lambda: mark.wait(timeout=30))

    def span(self, what, fn, *args, after=(), num_bytes=0):
        # a copy span calls copy, which queues by itself
        if self.name == "compute":
            self.run(fn, *args)
        else:
            fn(*args)


def late_streams(seed=0, compute=0.0, h2d=0.0, d2h=0.0):
    """Streams whose calls take up to that many seconds longer, at random."""
    rng = random.Random(seed)
    streams = [LateStream(name, (lambda d=d: rng.random() * d)) for name, d in (("compute", compute), ("h2d", h2d), ("d2h", d2h))]
    return Streams(*streams, HostClock(), LateEvent)
