"""Metrics of a run: metrics.jsonl is the truth, W&B mirrors it and can neither stop nor delay training.

    one row a step      a JSON object on one line, keys `group/name`, the step under `train/step`
    resume              rows are appended; of the rows of one step the newest counts
    NaN, inf            null, and `not_finite` lists the keys

W&B runs in a process of its own (runtime/wandb_mirror.py), fed through a pipe that is never waited for: whatever hangs
there, hangs there, and can be killed. This process never imports it.
"""
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model.errors import UserError

STEP = "train/step"
GROUPS = ("train", "val", "perf", "streams", "mem", "ckpt", "data")
METRICS_FILE = "metrics.jsonl"
# how long W&B may take to finish before it is killed
FINISH_S = 5.0
# rows waiting for W&B: some thousands, hours of a large model's steps
_BUFFER_BYTES = 8 << 20
_MIRROR = Path(__file__).with_name("wandb_mirror.py")


def strict(value: Any, name: str = "", not_finite: list[str] | None = None) -> Any:
    """`value` as strict JSON has it: numpy and torch become Python (a CUDA tensor is waited for), NaN and inf None.

    name: of the value; those that were not finite are added to `not_finite`, as `name` or `name[i]` or `name.key`.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        if not_finite is not None:
            not_finite.append(name)
        return None
    if isinstance(value, Mapping):
        return {str(k): strict(v, f"{name}.{k}" if name else str(k), not_finite) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v, f"{name}[{i}]", not_finite) for i, v in enumerate(value)]
    return value


def strict_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as metrics.jsonl has it, with `not_finite` if there is something to list; a row that came from here stays
    as it is. ValueError for a key without a group or a row without a step."""
    bad = [key for key in row if key != "not_finite" and (key.partition("/")[0] not in GROUPS or not key.partition("/")[2])]
    if bad or STEP not in row:
        raise ValueError(f"metrics are called group/name, group one of {GROUPS}, and {STEP} is one of them: {bad or list(row)}")
    not_finite: list[str] = []
    out = strict(row, not_finite=not_finite)
    return out | {"not_finite": not_finite} if not_finite else out


class MetricsLog:
    """Appends rows to metrics.jsonl, each a whole line in one write; a line torn by a kill is mended or cut off first."""

    def __init__(self, run_dir: Path | str):
        """Raises UserError where the file cannot be written."""
        self.path = Path(run_dir) / METRICS_FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self._mend()
        except OSError as error:
            raise UserError(f"{self.path}: metrics cannot be written: {error.strerror}") from error

    def _mend(self) -> None:
        lines = self.path.read_bytes()
        tail = lines[lines.rfind(b"\n") + 1:]
        if _parse(tail) is not None:
            os.write(self._fd, b"\n")
        elif tail:
            os.ftruncate(self._fd, len(lines) - len(tail))

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the row and returns it as written. Raises UserError where the disk does not take it."""
        out = strict_row(row)
        line = (json.dumps(out, allow_nan=False) + "\n").encode()
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(None, "the disk took a part of the line only")
        except OSError as error:
            raise UserError(f"{self.path}: metrics of step {out[STEP]} not written: {error.strerror}") from error
        return out

    def close(self) -> None:
        os.close(self._fd)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The newest row of each step, by step. A torn last line is left out; UserError for any other that is not a row."""
    lines = Path(path).read_bytes().split(b"\n")
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is not None and STEP in row:
            rows[row[STEP]] = row
        elif line.strip() and number < len(lines):
            raise UserError(f"{path}:{number}: not a row of metrics: a JSON object with {STEP} is expected")
    return [rows[step] for step in sorted(rows)]


class LossMean:
    """Token-weighted mean of the losses since the last `take`: what a row that covers several steps reports.

    steps: (loss, tokens) since then; a loss that was not finite may come back from a checkpoint as None.
    """

    def __init__(self):
        self.steps: list[tuple[float | None, int]] = []

    def add(self, loss: float | None, tokens: int) -> None:
        """loss: mean over the step's `tokens` supervised tokens, nats; None (no loss was formed) leaves the step out,
        NaN does not."""
        if loss is not None and tokens > 0:
            self.steps.append((float(loss), tokens))

    def take(self) -> float | None:
        """The mean, or None if no step had a loss; begins anew."""
        steps = [(math.nan if loss is None else loss, n) for loss, n in self.steps]
        self.steps = []
        if len({loss for loss, _ in steps}) == 1:
            # not loss * n / n, which may be an ulp off
            return steps[0][0]
        return sum(loss * n for loss, n in steps) / sum(n for _, n in steps) if steps else None


def _print_warning(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Wandb:
    """Mirrors rows to W&B. Nothing here waits, except `close`, and that FINISH_S seconds at most.

    Whatever goes wrong, is said once, by the caller's thread in `log` or `close`; after that rows go to metrics.jsonl only.
    """

    def __init__(self, mode: str, run_dir: Path | str, config: Mapping[str, Any], name: str, *,
                 warn: Callable[[str], None] = _print_warning, finish_s: float = FINISH_S, buffer_bytes: int = _BUFFER_BYTES):
        """mode: offline (no connection is tried), online or off. config: what W&B shows as the run's configuration.
        warn: is given the one line about trouble. Start it before host memory is filled."""
        if mode not in ("offline", "online", "off"):
            raise ValueError(f"W&B mode {mode!r}: offline, online or off is expected")
        self._metrics = (Path(run_dir) / METRICS_FILE).resolve()
        self._warn, self._finish_s, self._buffer_bytes = warn, finish_s, buffer_bytes
        self._waiting = bytearray()
        self._warned = False
        self._process: subprocess.Popen[bytes] | None = None
        if mode != "off":
            self._start(mode, self._metrics.parent, {"config": strict(config), "name": name})

    def _start(self, mode: str, run_dir: Path, run: dict[str, Any]) -> None:
        # -P: neither the mirror's folder (streams.py) nor this one (kernels/, wandb/) hides a package from W&B
        command = [sys.executable, "-P", str(_MIRROR), mode, str(run_dir), str(os.getpid()), str(self._finish_s)]
        try:
            # a session of its own: Ctrl-C in the terminal is not for it, and there is no terminal to prompt on
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True)
        except OSError as error:
            self._trouble(f"not started: {error.strerror}")
            return
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._put(run)

    def log(self, row: Mapping[str, Any]) -> None:
        """Hands the row over, or drops it and says so once if W&B is too far behind."""
        if self._process is None:
            return
        self._put(strict_row(row))
        if self._process is not None and self._process.poll() is not None:
            self._ended(f"its process ended with {self._process.returncode}")

    def close(self, ok: bool = True) -> None:
        """Lets W&B finish for some seconds, then kills it. ok: the run did what it was asked to."""
        if self._process is None:
            return
        deadline = time.monotonic() + self._finish_s
        self._put({"exit_code": 0 if ok else 1})
        while self._process is not None and self._waiting and time.monotonic() < deadline:
            time.sleep(0.01)
            self._flush()
        if self._process is None:
            return
        self._process.stdin.close()
        status = self._wait(deadline - time.monotonic())
        if status is None:
            self._ended(f"did not finish in {self._finish_s:g} s")
        else:
            self._ended(f"its process ended with {status}" if status else None)

    def _put(self, line: dict[str, Any]) -> None:
        # a configuration may hold paths and dtypes: their text will do
        data = json.dumps(line, allow_nan=False, default=str).encode() + b"\n"
        if len(self._waiting) + len(data) > self._buffer_bytes:
            self._trouble("does not keep up, rows are left out")
        else:
            self._waiting += data
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            try:
                taken = os.write(self._process.stdin.fileno(), self._waiting[:65536])
            except BlockingIOError:
                return
            except BrokenPipeError:
                # it is ending: the pipe's end goes a moment before the exit status is there
                self._ended(f"its process ended with {self._wait(0.5)}")
                return
            del self._waiting[:taken]

    def _wait(self, timeout_s: float) -> int | None:
        """The process's exit status, or None if it does not end by itself."""
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def _ended(self, trouble: str | None) -> None:
        """Lets go of the process. trouble: what to say, if it said nothing itself."""
        if self._process.returncode is None:
            self._process.kill()
            self._wait(1.0)
        process, self._process = self._process, None
        self._waiting.clear()
        process.stdin.close()
        said = (process.stdout.read() or b"").decode(errors="replace").strip()
        process.stdout.close()
        if trouble:
            self._trouble(said or trouble)

    def _trouble(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"W&B: {what}; training goes on, all metrics are in {self._metrics}")
