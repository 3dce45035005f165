"""How far a run is: a bar where somebody watches a terminal that is wide enough, plain lines elsewhere. No colours."""
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

# narrower terminals get lines: a bar beside the numbers would be a few characters
BAR_COLUMNS = 60
PLAIN_INTERVAL_S = 5.0
_BAR_FORMAT = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


class _Bar(tqdm):
    # tqdm's thread that redraws stuck bars; a step may take minutes and nothing is stuck
    monitor_interval = 0


class Progress:
    """Shows step, loss, tokens/s and time left. A terminal or pipe that goes away is no reason to stop."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, *, start: int = 0, interval_s: float = PLAIN_INTERVAL_S):
        """start: steps that an earlier run made. interval_s: least time between two plain lines. stream: sys.stderr."""
        self._total, self._stream, self._interval_s = total_steps, stream or sys.stderr, interval_s
        self._first: tuple[int, float] | None = None
        self._printed_at = float("-inf")
        self._columns = _columns(self._stream)
        self._bar = None
        if self._stream.isatty() and self._columns >= BAR_COLUMNS:
            self._bar = _Bar(total=total_steps, initial=start, file=self._stream, dynamic_ncols=True, miniters=1,
                             bar_format=_BAR_FORMAT, leave=True)

    def update(self, step: int, loss: float | None, tokens_per_s: float) -> None:
        """step: the last one that is done, from 1. loss: None where the step had none."""
        shown = "no loss" if loss is None else f"loss {loss:.4f}"
        rate = f"{tqdm.format_sizeof(tokens_per_s)} tok/s"
        if self._bar is not None:
            self._bar.set_postfix_str(f"{shown}, {rate}", refresh=False)
            self._write(self._bar.update, step - self._bar.n)
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        if now - self._printed_at >= self._interval_s or step == self._total:
            self._printed_at = now
            self._print_fitting([f"step {step}/{self._total}", shown, self._left(step, now), rate])

    def note(self, line: str) -> None:
        """Prints the line, above the bar if there is one."""
        if self._bar is not None:
            self._write(self._bar.write, line, self._stream)
        else:
            self._write(self._print, line)

    def close(self) -> None:
        if self._bar is not None:
            self._write(self._bar.close)

    def _left(self, step: int, now: float) -> str:
        # the first step compiles: time is measured from its end
        steps, seconds = step - self._first[0], now - self._first[1]
        return f"{tqdm.format_interval((self._total - step) * seconds / steps)} left" if steps else "? left"

    def _print_fitting(self, parts: list[str]) -> None:
        """A line that wraps is worse than one that leaves the last numbers out."""
        line = parts[0]
        for part in parts[1:]:
            if len(line) + 2 + len(part) < self._columns:
                line += ", " + part
        self._write(self._print, line)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def _write(self, write: Callable[..., object], *args: object) -> None:
        try:
            write(*args)
        except OSError:
            # a closed pipe or a terminal that hung up: all later writes, the one at exit too, shall succeed
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def _columns(stream: TextIO) -> int:
    """Width of the terminal, else COLUMNS, else 80."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return int(os.environ.get("COLUMNS", "") or 80)


def taking_memory(stream: TextIO | None = None) -> Callable[[int], None]:
    """Tells every few seconds how much host memory a start has taken; says nothing if it is quick."""
    stream, said_at = stream or sys.stderr, [time.monotonic()]

    def progress(num_bytes: int) -> None:
        if time.monotonic() - said_at[0] >= PLAIN_INTERVAL_S:
            said_at[0] = time.monotonic()
            print(f"taking host memory: {num_bytes / 2 ** 30:.0f} GiB", file=stream, flush=True)
    return progress
