"""metrics.jsonl against NaN, kills and resumed runs; W&B against everything that it can do wrong.

W&B is played by small packages on PYTHONPATH that raise, hang or die, and once by itself, offline, if it is installed.
"""
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from model.errors import UserError
from runtime.telemetry import LossMean, MetricsLog, Wandb, read_metrics

ROOT = Path(__file__).parents[2]
FINISH_S = 1.0


def rows_of(path):
    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")
    return [json.loads(line, parse_constant=fail) for line in path.read_text().splitlines()]


# metrics.jsonl

def test_LOG3_strict_json(tmp_path):
    log = MetricsLog(tmp_path)
    out = log.write({"train/step": np.int64(1), "train/loss": float("nan"), "train/grad_norm": torch.tensor(float("inf")),
                     "perf/tokens_per_s": np.float32(1.5), "streams/stall": {"weights": -math.inf, "slab": 0.0},
                     "data/left_out": ["a:1", "b:2"], "mem/gib": [torch.tensor(2.5, dtype=torch.bfloat16), None],
                     "train/skipped": np.bool_(True), "train/grad_norms": np.array([1.0, np.nan])})
    log.write({"train/step": 2, "train/loss": 1.0})
    first, second = rows_of(tmp_path / "metrics.jsonl")
    assert first == out == {
        "train/step": 1, "train/loss": None, "train/grad_norm": None, "perf/tokens_per_s": 1.5,
        "streams/stall": {"weights": None, "slab": 0.0}, "data/left_out": ["a:1", "b:2"], "mem/gib": [2.5, None],
        "train/skipped": True, "train/grad_norms": [1.0, None],
        "not_finite": ["train/loss", "train/grad_norm", "streams/stall.weights", "train/grad_norms[1]"]}
    assert second == {"train/step": 2, "train/loss": 1.0}


def test_names_have_a_known_group_and_a_row_has_a_step(tmp_path):
    log = MetricsLog(tmp_path)
    for keys in (["train/step", "loss"], ["train/step", "gpu/x"], ["train/step", "train/"], ["train/loss"]):
        row = dict.fromkeys(keys, 1)
        with pytest.raises(ValueError, match="group/name"):
            log.write(row)
    assert rows_of(tmp_path / "metrics.jsonl") == []


WRITER = """
import sys
from runtime.telemetry import MetricsLog
log = MetricsLog(sys.argv[1])
step = 0
while True:
    step += 1
    log.write({"train/step": step, "train/text": "x" * 5000})
"""


def test_LOG3_lines_are_whole_after_kill_9(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT) as writer:
        wait_until(lambda: (tmp_path / "metrics.jsonl").exists() and (tmp_path / "metrics.jsonl").stat().st_size > 1 << 20)
        writer.send_signal(signal.SIGKILL)
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert [json.loads(line)["train/step"] for line in lines[:-1]] == list(range(1, len(lines)))


@pytest.mark.parametrize("tail", ['{"train/step": 4, "train/lo', '{"train/step": 4', "\0\0\0\0", '{"train/step": 4}', '"', ""])
def test_a_torn_last_line_is_left_out_and_never_joined_to_the_next(tmp_path, tail):
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write({"train/step": step})
    with open(log.path, "a") as f:
        f.write(tail)
    whole = tail.endswith("}")
    assert [row["train/step"] for row in read_metrics(log.path)] == [1, 2, 3] + [4] * whole
    MetricsLog(tmp_path).write({"train/step": 5})
    assert [row["train/step"] for row in rows_of(log.path)] == [1, 2, 3] + [4] * whole + [5]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"train/step": 1}\n{"train/st\n{"train/step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a row"):
        read_metrics(path)


def test_LOG2_the_newest_row_of_a_step_counts(tmp_path):
    for attempt, steps in ((1, range(1, 8)), (2, range(6, 11))):
        log = MetricsLog(tmp_path)
        for step in steps:
            log.write({"train/step": step, "train/attempt": attempt})
        log.close()
    got = [(row["train/step"], row["train/attempt"]) for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert got == [(s, 1) for s in range(1, 6)] + [(s, 2) for s in range(6, 11)]


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match="run/metrics.jsonl: metrics cannot be written: "):
        MetricsLog(tmp_path / "run")


def test_LOG5_a_disk_that_is_full_ends_the_run_by_name(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path)
    monkeypatch.setattr(os, "write", lambda fd, data: 3)
    with pytest.raises(UserError, match="metrics of step 7 not written"):
        log.write({"train/step": 7})


# the mean loss

def test_LOSS10_mean_leaves_out_steps_without_a_loss():
    mean = LossMean()
    for loss in (3.0, None, 2.0, 1.0):
        mean.add(loss, 10)
    assert mean.take() == 2.0
    mean.add(None, 0)
    assert mean.take() is None and mean.take() is None


def test_LOSS1_the_mean_is_token_weighted_over_the_steps_since_the_last_row():
    mean = LossMean()
    mean.add(100.0, 7)
    mean.take()
    mean.add(3.0, 3)
    mean.add(1.0, 1)
    assert mean.take() == 2.5
    mean.add(loss := 0.1 + 0.2, 3)
    assert mean.take() == loss


def test_LOSS1_a_nan_loss_is_no_average_of_the_others():
    mean = LossMean()
    mean.add(3.0, 10)
    mean.add(float("nan"), 10)
    assert math.isnan(mean.take())
    mean.add(float("inf"), 10)
    mean.add(float("-inf"), 10)
    assert math.isnan(mean.take())


# W&B

FAKE = """
import json, os, signal, sys, time
from pathlib import Path
OUT = Path(os.environ["FAKE_OUT"])
def say(*what):
    with open(OUT, "a") as f:
        f.write(json.dumps(what) + "\\n")
class Run:
    def define_metric(self, *args, **kwargs):
        say("define_metric", args, kwargs)
    def log(self, row):
        {log}
        say("log", row)
    def finish(self, exit_code=None):
        {finish}
        say("finish", exit_code)
def init(**kwargs):
    say("init", kwargs, dict(os.environ), os.isatty(0), os.getpid())
    print("wandb: a line on stdout", flush=True)
    {init}
    return Run()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake(init=..., log=..., finish=...)`: a wandb whose calls begin with that code. Returns what reads its calls."""
    def make(module=None, **code):
        package = tmp_path / "packages" / "wandb"
        package.mkdir(parents=True)
        text = FAKE
        for name in ("init", "log", "finish"):
            text = text.replace("{" + name + "}", code.get(name, "pass"))
        (package / "__init__.py").write_text(module or text)
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        monkeypatch.setenv("FAKE_OUT", str(tmp_path / "calls"))
        # W&B's own folder where the command runs; must not be taken for the package
        (tmp_path / "cwd" / "wandb").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "cwd")

        def calls(kind=None):
            if not (tmp_path / "calls").exists():
                return []
            all_calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
            return [call for call in all_calls if kind in (None, call[0])]
        return calls
    return make


def train(run_dir, mode="offline", steps=range(1, 6), **options):
    """A run of some steps. Returns its warnings, seconds in `log`, seconds in `close`."""
    warnings, log = [], MetricsLog(run_dir)
    mirror = Wandb(mode, run_dir, {"lr": 1e-3, "clip": float("inf"), "data": [Path("a.txt")]}, "run", warn=warnings.append,
                   **{"finish_s": FINISH_S} | options)
    logging_s = 0.0
    for step in steps:
        row = log.write({"train/step": step, "train/loss": 1.0 / step, "val/loss": float("nan"), "data/left_out": ["a:1"]})
        began = time.monotonic()
        mirror.log(row)
        logging_s += time.monotonic() - began
    began = time.monotonic()
    mirror.close()
    closing_s = time.monotonic() - began
    mirror.close()
    assert [row["train/step"] for row in rows_of(run_dir / "metrics.jsonl")][-len(steps):] == list(steps)
    return warnings, logging_s, closing_s


def wait_until(condition):
    for _ in range(1200):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("a minute was not enough")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_rows_arrive_with_an_axis_of_their_own(tmp_path, fake):
    calls = fake()
    warnings, _, _ = train(tmp_path, finish_s=20.0)
    assert warnings == []
    (_, kwargs, environment, tty, _), = calls("init")
    assert kwargs == {"dir": str(tmp_path), "mode": "offline", "name": "run", "group": "run",
                      "config": {"lr": 1e-3, "clip": None, "data": ["a.txt"]}}
    assert environment["WANDB_MODE"] == "offline" and environment["WANDB_SILENT"] == "true" and not tty
    assert [call[1:] for call in calls("define_metric")] == [[["train/step"], {}], [["*"], {"step_metric": "train/step"}]]
    assert calls("log") == [["log", {"train/step": s, "train/loss": 1.0 / s}] for s in range(1, 6)]
    assert calls("finish") == [["finish", 0]]


def test_LOG2_wandb_gets_the_steps_of_the_second_attempt(tmp_path, fake):
    calls = fake()
    train(tmp_path, "online", range(1, 8), finish_s=20.0)
    train(tmp_path, "online", range(6, 11), finish_s=20.0)
    assert [row["train/step"] for _, row in calls("log")] == [*range(1, 8), *range(6, 11)]
    first, second = (call[1] for call in calls("init"))
    assert first["id"] == second["id"] and second["resume"] == "allow"


def test_off_starts_nothing(tmp_path, fake):
    calls = fake()
    assert train(tmp_path, "off")[0] == []
    assert calls() == []


def test_a_run_that_is_cut_short_is_called_failed(tmp_path, fake):
    calls = fake()
    script = f"from runtime.telemetry import Wandb; w = Wandb('offline', {str(tmp_path)!r}, {{}}, 'run'); 1 / 0"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL,
                   env=os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}"})
    assert wait_until(lambda: calls("finish")) == [["finish", 1]]


TROUBLE = {
    "init raises": ({"init": "raise RuntimeError('logged out:\\nno key')"}, "could not start: RuntimeError: logged out: no key"),
    "init exits": ({"init": "os._exit(3)"}, "its process ended with 3"),
    "init exits with 0": ({"init": "sys.exit(0)"}, "could not start: SystemExit: 0"),
    "log raises at step 3": ({"log": "if row['train/step'] == 3: raise OSError('no')"}, "could not take step 3: OSError: no"),
    "killed at step 3": ({"log": "if row['train/step'] == 3: os.kill(os.getpid(), 9)"}, "its process ended with -9"),
    "finish raises": ({"finish": "raise OSError('broken')"}, "could not finish: OSError: broken"),
}


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize(("code", "said"), TROUBLE.values(), ids=TROUBLE)
def test_LOG1_trouble_is_said_once_and_training_goes_on(tmp_path, fake, code, said, mode):
    fake(**code)
    warnings, logging_s, _ = train(tmp_path, mode, finish_s=20.0)
    assert warnings == [f"W&B: {said}; training goes on, all metrics are in {tmp_path / 'metrics.jsonl'}"]
    assert logging_s < 10.0


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_LOG7_what_hangs_neither_delays_steps_nor_the_end(tmp_path, fake, where):
    # deaf to a polite signal too
    calls = fake(**{where: "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(90)"})
    warnings, logging_s, closing_s = train(tmp_path)
    assert len(warnings) == 1 and "did not finish in 1 s" in warnings[0] and str(tmp_path / "metrics.jsonl") in warnings[0]
    assert logging_s < 10.0 and closing_s < FINISH_S + 10.0
    wait_until(lambda: gone(calls("init")[0][4]))


def test_LOG1_rows_that_wandb_does_not_take_are_dropped_with_one_warning(tmp_path, fake):
    fake(log="time.sleep(60)")
    warnings, logging_s, closing_s = train(tmp_path, steps=range(1, 1501), buffer_bytes=20_000)
    assert len(warnings) == 1 and "does not keep up" in warnings[0]
    assert logging_s < 10.0 and closing_s < FINISH_S + 10.0


def test_LOG1_a_slow_wandb_gets_every_row(tmp_path, fake):
    # more rows meanwhile than the pipe holds
    calls = fake(log="time.sleep(0.5 if row['train/step'] == 1 else 0)")
    warnings, _, _ = train(tmp_path, steps=range(1, 1001), finish_s=30.0)
    assert warnings == [] and [row["train/step"] for _, row in calls("log")] == list(range(1, 1001))


def test_LOG1_a_hanging_wandb_goes_when_training_was_killed(tmp_path, fake):
    calls = fake(log="time.sleep(90)")
    script = textwrap.dedent(f"""
        import time
        from runtime.telemetry import Wandb
        mirror = Wandb("offline", {str(tmp_path)!r}, {{}}, "run", finish_s=0.5)
        mirror.log({{"train/step": 1}})
        print("up", flush=True)
        time.sleep(60)
        """)
    environment = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, env=environment) as trainer:
        trainer.stdout.readline()
        wait_until(lambda: len(calls("define_metric")) == 2)
        trainer.send_signal(signal.SIGKILL)
    wait_until(lambda: gone(calls("init")[0][4]))


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_LOG7_wandb_is_not_installed(tmp_path, fake, mode):
    fake(module="raise ModuleNotFoundError('no wandb', name='wandb')")
    warnings, _, _ = train(tmp_path, mode, finish_s=20.0)
    assert len(warnings) == 1 and warnings[0].startswith("W&B: could not start: it is not installed; training goes on")


def test_this_process_imports_neither_wandb_nor_torch():
    script = "import sys, runtime.telemetry; print({'wandb', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


installed = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="W&B is not installed")

NO_NETWORK = """
import os, socket
real = socket.socket.connect
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
        open(os.environ["CONNECTIONS"], "a").write(f"{address}\\n")
        raise OSError("no network")
    return real(self, address)
socket.socket.connect = connect
"""


def processes_of(run_dir):
    """Pids of the run's mirror and of the W&B service that it started."""
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines[int(path.parent.name)] = path.read_bytes().decode().split("\0")
        except OSError:
            continue
    mirror, = (pid for pid, words in lines.items() if str(run_dir) in words and any("wandb_mirror" in w for w in words))
    service, = (pid for pid, words in lines.items() if words[0].endswith("wandb-core") and str(mirror) in words)
    return {"mirror": mirror, "service": service}


@installed
def test_LOG7_the_real_wandb_offline_tries_no_connection(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_NETWORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("CONNECTIONS", str(tmp_path / "connections"))
    warnings, _, _ = train(tmp_path, finish_s=60.0)
    assert warnings == [] and not (tmp_path / "connections").exists()
    written, = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/loss" in written.read_bytes()


@installed
def test_LOG1_the_service_of_the_real_wandb_is_killed(tmp_path):
    warnings = []
    mirror = Wandb("offline", tmp_path, {}, "run", warn=warnings.append)
    mirror.log({"train/step": 1})
    wait_until(lambda: list(tmp_path.glob("wandb/offline-run-*/run-*.wandb")))
    found = processes_of(tmp_path)
    os.kill(found["service"], signal.SIGKILL)
    for step in range(2, 20):
        mirror.log({"train/step": step})
    began = time.monotonic()
    mirror.close()
    assert time.monotonic() - began < 20.0 and len(warnings) == 1, warnings
    wait_until(lambda: gone(found["mirror"]))
