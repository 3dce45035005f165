"""The command: runs of a very small model from flags to exit code, and everything that it refuses.

Runs are made in this process, a few in one of their own (exit codes, signals, pipes, what is imported).
"""
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import runtime.optimizer
import train
from data.batches import Batches
from model import reference
from model.config import PRESETS, ModelConfig
from runtime import checkpoint, machine
from runtime.machine import Machine
from runtime.telemetry import MetricsLog
from runtime.trainer import Trainer
from tests.runtime.make import ops_with

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "cases"
NANO = ModelConfig("nano", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=257, max_positions=8192,
                   tied=True)
TEXTS = ["".join(chr(97 + (i * i + k * i) % 23) for i in range(10 + 37 * k)) for k in range(8)]


@pytest.fixture(autouse=True)
def nano(monkeypatch, tmp_path):
    monkeypatch.setitem(PRESETS, "nano", NANO)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path):
    """`text(documents)`: each in a file; gives their names."""
    def make(documents=TEXTS):
        names = [f"{i}.txt" for i in range(len(documents))]
        for name, document in zip(names, documents, strict=True):
            (tmp_path / name).write_text(document)
        return names
    return make


class Outcome:
    """Exit code and output of a run, and what it left in its directory."""

    def __init__(self, code, out, err, run_dir):
        self.code, self.out, self.err, self.run_dir = code, out, err, run_dir

    @property
    def rows(self):
        """Of metrics.jsonl, the newest of each step, by step."""
        def fail(constant):
            raise AssertionError(f"{constant} is not JSON")
        rows = [json.loads(line, parse_constant=fail) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return {row["train/step"]: row for row in rows}

    def each(self, key):
        return [row[key] for _, row in sorted(self.rows.items())]

    def state(self, step):
        """Checksums of every tensor in the checkpoint of `step`."""
        path = self.run_dir / "checkpoints" / f"step-{step:08d}"
        checkpoint.verify(path, deep=True)
        files = json.loads((path / "manifest.json").read_text())["files"]
        return {file: entry["sha256"] for file, entry in files.items() if file.endswith(".safetensors")}

    def meta(self, step):
        return json.loads((self.run_dir / "checkpoints" / f"step-{step:08d}" / "meta.json").read_text())


@pytest.fixture
def run(capfd, tmp_path):
    """`run(flags...)`: the command; its directory is `run` if no flag says another."""
    def make(*flags, name="run"):
        flags = [str(flag) for flag in flags]
        capfd.readouterr()
        place = [] if {"--resume", "--run"} & {*flags} else ["--run", name]
        try:
            code = train.main([*flags, *place])
        except SystemExit as stopped:
            code = stopped.code
        return Outcome(code, *capfd.readouterr(), tmp_path / name)
    return make


@pytest.fixture
def nano_run(run, text):
    """`nano_run(flags...)`: a run of the small model on TEXTS; a later flag wins."""
    names = text()

    def make(*flags, **more):
        return run("--model", "nano", "--data", *names, "--seq", 32, "--batch", 4, "--steps", 4, "--lr", 1e-2, "--warmup", 2,
                   "--wandb", "off", *flags, **more)
    return make


def stop_at(monkeypatch, step, number=signal.SIGINT, times=1):
    """Sends this process a signal just before it writes the row of `step`."""
    write = MetricsLog.write

    def interrupted(self, row):
        for _ in range(times if row["train/step"] == step else 0):
            signal.raise_signal(number)
        return write(self, row)
    monkeypatch.setattr(MetricsLog, "write", interrupted)


def masked_steps(monkeypatch, *steps):
    """Nothing is supervised in these steps, counted from 1."""
    drawn, next_rows = [0], Batches.next_rows

    def masking(self):
        batch = next_rows(self)
        drawn[0] += 1
        if drawn[0] in steps:
            batch.labels[:] = -100
            batch.supervised = 0
        return batch
    monkeypatch.setattr(Batches, "next_rows", masking)


def spoiled_from(monkeypatch, first, last=1 << 30):
    """The loss of the step's first micro-batch is NaN from step `first` on, counted from 1."""
    calls = [0]

    def linear_cross_entropy(x, w, labels, *rest, losses, dx=None, **more):
        reference.linear_cross_entropy(x, w, labels, *rest, losses=losses, dx=dx, **more)
        if dx is not None:
            calls[0] += 1
            if first <= calls[0] <= last:
                losses[(labels >= 0).nonzero()[0]] = math.nan
    monkeypatch.setattr("runtime.trainer.choose_ops", lambda *_: ops_with(linear_cross_entropy=linear_cross_entropy))


def tree(path):
    """Every file below, with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


def command(*flags, python=(), **more):
    return subprocess.Popen([sys.executable, *python, str(ROOT / "train.py"), *map(str, flags)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **more)


# little data, odd lengths

@pytest.fixture(scope="module")
def tiny_txt(tmp_path_factory):
    """DATA6's run in a process of its own, its output in pipes, in 40 columns."""
    place = tmp_path_factory.mktemp("tiny")
    environment = os.environ | {"COLUMNS": "40", "NO_COLOR": "1"}
    process = command("--data", CASES / "tiny.txt", "--seq", 64, "--batch", 8, "--steps", 5, "--wandb", "off", "--run", "run",
                      cwd=place, env=environment)
    out, err = process.communicate(timeout=60)
    return Outcome(process.returncode, out, err, place / "run")


def test_DATA6_little_data_repeats_and_shows_its_epochs(tiny_txt):
    assert tiny_txt.code == 0
    # 21 tokens with the end, taken anew by each of 8 rows of 64
    assert tiny_txt.each("data/epoch") == [8 * -(-64 * step // 21) - 1 for step in range(1, 6)]
    assert "1 document, 21 tokens; 5 steps take 2560: 122 times all of it" in " ".join(tiny_txt.out.split())
    assert "validation is on the training text" in " ".join(tiny_txt.out.split())
    assert tiny_txt.state(5)


def test_LOG6_a_pipe_gets_plain_lines(tiny_txt):
    for text in (tiny_txt.out, tiny_txt.err):
        assert not re.search(r"[\r\x1b\b]", text)
    assert "step 5/5, loss" in tiny_txt.err
    assert all(len(line) < 40 for line in tiny_txt.err.splitlines() if line.startswith("step ") and "/5" in line)


@pytest.mark.parametrize(("flags", "code"), [(["--help"], 0), (["--stpes", "5"], 2)], ids=["help", "misspelt flag"])
def test_LOG6_help_needs_no_torch_and_no_second(flags, code):
    began = time.perf_counter()
    process = command(*flags, python=["-X", "importtime"])
    out, err = process.communicate(timeout=60)
    assert time.perf_counter() - began < 1.0
    assert process.returncode == code and ("--clip {exact,layer,none}" in out) == (code == 0)
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert "argparse" in imported and not {"torch", "numpy", "tqdm"} & imported


@pytest.mark.parametrize("T", [127, 128, 129, 8191])
def test_POS7_lengths(nano_run, T):
    got = nano_run("--seq", T, "--batch", 1, "--micro-batch", 1, "--steps", 1)
    assert got.code == 0 and math.isfinite(got.each("train/loss")[0]) and math.isfinite(got.each("val/loss")[0])
    assert 0 < got.each("data/supervised")[0] < T


def test_POS7_a_row_of_one_token_is_refused(nano_run, tmp_path):
    got = nano_run("--seq", 1)
    assert got.code == 2 and got.err.startswith("error: --seq 1: nothing to predict") and not got.run_dir.exists()


# what rows of metrics say

def test_LOSS1_a_row_covers_its_steps_by_their_tokens(nano_run):
    # padded: steps have unequally many tokens
    each = nano_run("--no-pack", "--steps", 5, name="each").rows
    pairs = nano_run("--no-pack", "--steps", 5, "--log-every", 2, name="pairs").rows
    assert [step for step, row in pairs.items() if "train/loss" in row] == [2, 4, 5]
    loss, tokens = ({step: row[key] for step, row in each.items()} for key in ("train/loss", "data/supervised"))
    for step in (2, 4):
        mean = (loss[step - 1] * tokens[step - 1] + loss[step] * tokens[step]) / (tokens[step - 1] + tokens[step])
        assert pairs[step]["train/loss"] == mean != (loss[step - 1] + loss[step]) / 2
    assert pairs[5]["train/loss"] == loss[5]
    for key in ("train/grad_norm", "train/lr", "data/supervised"):
        assert [row[key] for row in pairs.values()] == [row[key] for row in each.values()]


def test_LOG2_a_row_that_a_stop_divides_covers_both_sides(nano_run, run, monkeypatch):
    whole = nano_run("--log-every", 2, name="whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert nano_run("--log-every", 2).code == 130
    resumed = run("--resume", "run", "--wandb", "off")
    assert resumed.code == 0 and list(resumed.rows) == [1, 2, 3, 4]
    for key in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
        assert {s: row.get(key) for s, row in resumed.rows.items()} == {s: row.get(key) for s, row in whole.rows.items()}


def test_LOSS2_a_step_without_supervision_changes_nothing_and_the_run_goes_on(run, text):
    # documents of 3 tokens in rows of 2: every second row of three holds an end and a beginning; so does the validation's last
    got = run("--model", "nano", "--data", *text(["ab", "cd", "ef", "gh"]), "--seq", 2, "--batch", 1, "--steps", 6, "--lr", 1e-2,
              "--warmup", 3, "--wandb", "off", "--save-every", 1, "--keep-checkpoints", 9)
    assert got.code == 0 and got.each("data/supervised") == [1, 0, 1] * 2
    assert got.each("train/skipped") == [False, True, False] * 2
    assert [loss is None for loss in got.each("train/loss")] == [False, True, False] * 2
    assert [norm is None for norm in got.each("train/grad_norm")] == [False, True, False] * 2
    states = {step: got.state(step) for step in range(1, 7)}
    assert states[1] == states[2] != states[3] and states[4] == states[5] != states[6]
    assert [got.meta(step)["applied_steps"] for step in range(1, 7)] == [1, 1, 2, 3, 3, 4]
    # the schedule waits too
    assert [got.rows[step]["train/lr"] for step in (1, 3)] == [1e-2 / 3, 2e-2 / 3]
    assert re.search(r"step 2: .*supervised.*\d\.txt", got.err) and "2 with nothing supervised" in got.err
    assert math.isfinite(got.rows[6]["val/loss"])


def test_LOSS10_the_mean_leaves_the_empty_step_out(nano_run, text, monkeypatch):
    # rows that hold one piece each have equally many tokens
    names = text(["abcdefg" * 300, "abc" * 100])
    masked_steps(monkeypatch, 2)
    losses, step = iter([3.0, 2.0, 1.0]), Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, batches, supervised, meanwhile: dataclasses.replace(
        step(self, batches, supervised, meanwhile), loss=next(losses)))
    got = nano_run("--log-every", 4, "--data", *names)
    assert got.code == 0 and got.each("data/supervised") == [4 * 31, 0, 4 * 31, 4 * 31]
    assert got.rows[4]["train/loss"] == json.loads((CASES / "empty_step.json").read_text())["right_mean"] == 2.0
    assert got.rows[2]["train/loss"] is None and got.rows[2]["train/skipped"] and got.meta(4)["applied_steps"] == 3


@pytest.mark.parametrize("log_every", [1, 2])
def test_LOG3_a_loss_that_is_nan_is_null_and_said(nano_run, monkeypatch, log_every):
    spoiled_from(monkeypatch, 3, 3)
    got = nano_run("--log-every", log_every, "--save-every", 1, "--keep-checkpoints", 9)
    assert got.code == 0 and got.rows[3]["train/loss"] is None and got.rows[3]["not_finite"] == ["train/loss"]
    assert got.rows[3]["train/skipped"] and got.rows[3]["train/not_finite_in"][0] == "loss"
    # step 4's row is the mean of 3 and 4 with --log-every 2: no number
    assert (got.rows[4]["train/loss"] is None) == (log_every == 2) and not got.rows[4]["train/skipped"]
    assert re.search(r"step 3 skipped: not finite: loss", got.err) and "1 not finite" in got.err
    assert got.state(2) == got.state(3) != got.state(4) and got.rows[3]["train/lr"] == got.rows[4]["train/lr"]


# ends

@pytest.mark.parametrize("steps", [50, 12])
def test_NUM1_many_skipped_in_a_row_end_the_run(nano_run, monkeypatch, steps):
    spoiled_from(monkeypatch, 3)
    got = nano_run("--steps", steps, "--save-every", 2, "--keep-checkpoints", 9)
    assert got.code == 3 and len(got.rows) == 12 and "error: 10 steps in a row" in got.err
    assert got.state(12) == got.state(2) and got.meta(12)["applied_steps"] == 2
    # fewer in a row do not
    with monkeypatch.context() as patch:
        spoiled_from(patch, 2, 10)
        assert nano_run("--steps", 12, name="other").code == 0


def test_LOG5_an_error_in_an_updating_thread_ends_the_run(nano_run, monkeypatch):
    update, calls = runtime.optimizer.update, [0]

    def failing(*args):
        calls[0] += 1
        if calls[0] == 20:
            failed.append(time.perf_counter())
            raise ZeroDivisionError("made to fail")
        update(*args)
    failed = []
    monkeypatch.setattr(runtime.optimizer, "update", failing)
    with pytest.raises(RuntimeError, match="made to fail"):
        nano_run("--steps", 1000, "--save-every", 1)
    assert time.perf_counter() - failed[0] < 5.0
    assert not [thread for thread in threading.enumerate() if thread.name == "adamw"]
    # the step whose update failed has a row but no checkpoint; those before it are whole
    rows = [json.loads(line)["train/step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    saved = sorted(Path("run/checkpoints").iterdir())
    assert [path.name for path in saved] == [f"step-{step:08d}" for step in (rows[-1] - 2, rows[-1] - 1)]
    for path in saved:
        checkpoint.verify(path, deep=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_finishes_its_step_and_saves(nano_run, monkeypatch, number):
    stop_at(monkeypatch, 2, number)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    got = nano_run()
    assert got.code == 130 and list(got.rows) == [1, 2] and got.state(2) and got.meta(2)["applied_steps"] == 2
    assert "stopped after step 2 of 4; go on with: python train.py --resume run" in got.out
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_LOG4_the_second_signal_stops_at_once_and_says_what_is_lost(nano_run, monkeypatch):
    stop_at(monkeypatch, 2, times=2)
    got = nano_run()
    assert got.code == 130 and list(got.rows) == [1] and not (got.run_dir / "checkpoints").exists()
    assert "lost" in got.err.splitlines()[-1] and "Traceback" not in got.err


def test_a_signal_in_the_last_step_leaves_the_run_complete(nano_run, monkeypatch):
    stop_at(monkeypatch, 4)
    got = nano_run()
    assert got.code == 0 and got.state(4) and "go on with" not in got.out


def test_an_interrupted_process_exits_with_130(text, tmp_path):
    process = command("--data", *text(), "--seq", 32, "--batch", 2, "--steps", 100000, "--wandb", "off", "--run", "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "stopping after this step" in err
    path, broken = checkpoint.find(tmp_path / "run")
    checkpoint.verify(path, deep=True)
    assert not broken and int(path.name[5:]) == len(metrics.read_text().splitlines())


# whole and parts

@pytest.mark.parametrize(("stop", "flags"), [(5, []), (1, ["--clip", "layer", "--precision", "bf16"]), (9, ["--no-pack"])],
                         ids=["5 + 5", "1 + 9 layer bf16", "9 + 1 padded"])
def test_CKPT7_whole_equals_parts(nano_run, run, monkeypatch, stop, flags):
    flags = ["--steps", 10, "--sample", 3, *flags]
    whole = nano_run(*flags, name="whole")
    with monkeypatch.context() as patch:
        stop_at(patch, stop)
        assert nano_run(*flags).code == 130
    resumed = run("--resume", "run", "--wandb", "off")
    assert whole.code == resumed.code == 0 and f"resumed at step {stop}" in resumed.out
    # the data is read more than once in these steps
    assert whole.rows[10]["data/epoch"] >= 1
    for key in ("train/loss", "train/grad_norm", "train/lr", "data/epoch", "data/supervised"):
        assert resumed.each(key) == whole.each(key)
    assert resumed.state(10) == whole.state(10)
    assert {**resumed.meta(10), "options": 0} == {**whole.meta(10), "options": 0}
    assert resumed.rows[10]["val/loss"] == whole.rows[10]["val/loss"]
    sample = [line for got in (whole, resumed) for line in got.err.splitlines() if line.startswith("sample")]
    assert len(sample) == 2 and sample[0] == sample[1]


def test_CKPT8_the_schedule_goes_on_where_it_was(nano_run, run, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        nano_run("--schedule", "linear", "--lr", 1e-5, "--warmup", 0, "--steps", 10)
    resumed = run("--resume", "run", "--wandb", "off")
    assert resumed.each("train/lr") == [pytest.approx(k * 1e-6, rel=1e-12) for k in range(10, 0, -1)]


def test_CKPT8_what_a_resumed_run_changes_is_printed(nano_run, run):
    nano_run("--schedule", "linear", "--warmup", 0, "--steps", 2)
    resumed = run("--resume", "run", "--lr", 5e-3, "--steps", 4, "--wandb", "off")
    assert resumed.code == 0 and "lr: 0.01 -> 0.005; steps: 2 -> 4" in resumed.out
    # of the new schedule: two of its four steps are left
    assert resumed.each("train/lr")[2:] == [pytest.approx(2.5e-3), pytest.approx(1.25e-3)]
    again = run("--resume", "run", "--wandb", "off")
    assert again.code == 0 and "->" not in again.out and len(again.rows) == 4


def test_CKPT12_other_data_is_refused_and_moved_data_is_not(nano_run, run, text, tmp_path):
    nano_run()
    (tmp_path / "moved").mkdir()
    moved = [str(Path(name).rename(tmp_path / "moved" / name)) for name in text()]
    good = run("--resume", "run", "--data", *moved, "--steps", 5, "--wandb", "off")
    assert good.code == 0 and "data: ['0.txt'" in good.out
    Path(moved[0]).write_text("another text")
    before = tree(tmp_path)
    other = run("--resume", "run", "--steps", 6, "--wandb", "off")
    assert other.code == 2 and other.err.startswith("error: ") and "data: {" in other.err and tree(tmp_path) == before


def test_DATA9_evaluating_sampling_and_logging_change_nothing(nano_run):
    plain = nano_run("--steps", 6, "--log-every", 6, name="plain")
    busy = nano_run("--steps", 6, "--eval-every", 1, "--sample", 4, "--save-every", 2, name="busy")
    assert plain.state(6) == busy.state(6) and len([r for r in busy.rows.values() if "val/loss" in r]) == 6
    assert plain.each("train/grad_norm") == busy.each("train/grad_norm")


def test_a_step_is_saved_once(nano_run, monkeypatch):
    saved, save = [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda run_dir, step, *rest: saved.append(step) or save(run_dir, step, *rest))
    stop_at(monkeypatch, 4)
    assert nano_run("--steps", 6, "--save-every", 2).code == 130 and saved == [2, 4]


# choices

@pytest.mark.parametrize("flags", [["--precision", "bf16"], ["--precision", "bf16", "--grads", "fp32"], ["--clip", "layer"],
                                   ["--clip", "none"], ["--no-pack"], ["--micro-batch", 1, "--threads", 2], ["--schedule", "wsd"],
                                   ["--no-save"], ["--host-memory", "4GiB"]], ids=lambda flags: " ".join(map(str, flags)))
def test_every_choice_trains(nano_run, flags):
    got = nano_run("--steps", 8, *flags)
    losses = got.each("train/loss")
    assert got.code == 0 and losses[-1] < losses[0] - 0.05 and abs(losses[0] - math.log(257)) < 0.5
    assert (got.run_dir / "checkpoints").exists() == ("--no-save" not in flags)


def test_tokens_are_steps(nano_run, run, text):
    got = run("--model", "nano", "--data", *text(), "--seq", 32, "--batch", 4, "--tokens", 257, "--wandb", "off")
    assert got.code == 0 and len(got.rows) == 3


def test_LOG6_what_a_model_writes_is_no_command_to_the_terminal(nano_run):
    # all bytes are about equally likely in an untrained model
    got = nano_run("--steps", 1, "--lr", 0, "--sample", 300)
    sample = got.err.partition("sample: def ")[2].partition("\nsaved ")[0]
    assert "\ufffd" in sample and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", sample)


def test_all_presets_are_listed(run):
    got = run("--list-models")
    assert got.code == 0 and not got.run_dir.exists()
    named = [line.split()[0] for line in got.out.splitlines()]
    assert [name for name in named if name in PRESETS] == list(PRESETS) and "120b" in PRESETS


def test_a_plan_writes_nothing(nano_run, tmp_path):
    before = tree(tmp_path)
    got = nano_run("--plan")
    assert got.code == 0 and got.out.startswith("plan  nano") and tree(tmp_path) == before


@pytest.mark.parametrize(("spoiled", "exit_code"), [(False, 0), (True, 1)], ids=["complete", "ended early"])
def test_wandb_gets_every_row_and_how_it_ended(nano_run, tmp_path, monkeypatch, spoiled, exit_code):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(
        "import json\n"
        "def say(*what):\n    print(json.dumps(what), file=open('calls', 'a'))\n"
        "class Run:\n"
        "    def define_metric(self, *args, **kwargs): pass\n"
        "    def log(self, row): say('log', row['train/step'])\n"
        "    def finish(self, exit_code=None): say('finish', exit_code)\n"
        "def init(**kwargs):\n    say('init', kwargs['config']['options']['lr'])\n    return Run()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    if spoiled:
        spoiled_from(monkeypatch, 1)
    got = nano_run("--wandb", "offline", "--steps", 12)
    assert got.code == (3 if spoiled else 0) and "W&B" not in got.err
    calls = [json.loads(line) for line in Path("calls").read_text().splitlines()]
    steps = 10 if spoiled else 12
    assert calls == [["init", 0.01], *(["log", step] for step in range(1, steps + 1)), ["finish", exit_code]]


# refused: one line, exit code 2, nothing written

@pytest.mark.parametrize(("flags", "said"), [
    (["--model", "nanno"], "--model nanno: no such model; did you mean nano"),
    (["--seq", 8193], "--seq 8193: nano has positions for 8192 tokens"),
    (["--micro-batch", 3], "--micro-batch 3: a step of --batch 4 sequences does not divide"),
    (["--tokens", 1000], "--tokens and --steps both given"),
    (["--steps", 0], "--steps 0: at least 1"),
    (["--batch", -1], "--batch -1: at least 1"),
    (["--seq", -32], "--seq -32: at least 1"),
    (["--lr", -0.1], "--lr -0.1: at least 0"),
    (["--lr", "nan"], "--lr nan"),
    (["--lr", "inf"], "--lr inf"),
    (["--eps", 0], "--eps 0.0: above 0"),
    (["--max-norm", 0], "--max-norm 0.0: above 0"),
    (["--beta2", 1], "--beta2 1.0"),
    (["--seed", -1], "--seed -1: at least 0"),
    (["--seed", 1 << 70], f"--seed {1 << 70}"),
    (["--device", "cuda"], "--device cuda"),
    (["--host-memory", "lots"], "--host-memory"),
    (["--host-memory", "1GiB"], "host memory missing"),
    (["--resume", "nowhere"], "--resume nowhere: no whole checkpoint there"),
], ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "")
def test_what_makes_no_sense_is_refused(nano_run, tmp_path, flags, said):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = tree(tmp_path)
    got = nano_run(*flags)
    assert got.code == 2 and got.err.startswith("error: ") and said in got.err and len(got.err.splitlines()) == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["empty.txt", "folder", "broken.txt", "binary.txt", "pickle.bin", "missing.txt"])
def test_DATA5_not_a_corpus(run, tmp_path, name):
    Path("empty.txt").touch()
    Path("folder").mkdir()
    Path("broken.txt").symlink_to("gone.txt")
    Path("binary.txt").write_bytes(bytes(range(256)))
    Path("pickle.bin").write_bytes((CASES / "pickle.bin").read_bytes())
    before = tree(tmp_path)
    got = run("--model", "nano", "--data", name, "--wandb", "off")
    assert got.code == 2 and got.err.startswith(f"error: {name}:") and len(got.err.splitlines()) == 1 and tree(tmp_path) == before


def test_LOSS2_nothing_supervised_at_all_is_refused(run, text, tmp_path):
    names = text(["ab", "c"])
    before = tree(tmp_path)
    got = run("--model", "nano", "--data", *names, "--seq", 1, "--wandb", "off")
    assert got.code == 2 and "nothing to predict" in got.err and tree(tmp_path) == before


def test_a_directory_that_holds_another_run_is_refused(nano_run):
    first = nano_run()
    before = tree(first.run_dir)
    again = nano_run()
    assert again.code == 2 and "--run run: holds a run already; go on with it by --resume run" in again.err
    assert tree(first.run_dir) == before
    both = nano_run("--resume", "run", "--run", "other")
    assert both.code == 2 and "--run other" in both.err and tree(first.run_dir) == before


def test_a_run_that_ended_before_its_first_step_leaves_its_name_free(nano_run, monkeypatch):
    with monkeypatch.context() as patch:
        def out_of_memory(*_):
            raise checkpoint.UserError("host memory: 12 GiB wanted, 3 GiB pinned")
        patch.setattr(Trainer, "lay_out", out_of_memory)
        failed = nano_run()
        assert failed.code == 2 and failed.err == "error: host memory: 12 GiB wanted, 3 GiB pinned\n"
    assert nano_run().code == 0
    # without checkpoints, the rows say that there was a run
    assert nano_run("--no-save", name="rows").code == 0 and nano_run("--no-save", name="rows").code == 2


def test_CKPT4_too_little_room_is_refused_before_anything_is_written(nano_run, tmp_path, monkeypatch):
    usage = checkpoint.shutil.disk_usage("/")
    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        got = nano_run()
        assert got.code == 2 and "checkpoints need" in got.err and "are missing" in got.err and tree(tmp_path) == before
        assert nano_run("--no-save", name="unsaved").code == 0
    # what was refused is no run: its name is free
    assert nano_run().code == 0


def test_CKPT4_a_disk_that_is_full_at_the_save_leaves_the_old_checkpoint(nano_run, monkeypatch):
    write = checkpoint._write

    def full(path, parts):
        if "step-00000004" in str(path) and "layer-1" in path.name:
            raise checkpoint.UserError(f"{path}: No space left on device")
        return write(path, parts)
    monkeypatch.setattr(checkpoint, "_write", full)
    got = nano_run("--save-every", 2, "--steps", 6)
    assert got.code == 2 and "checkpoint of step 4 not written" in got.err
    assert "previous checkpoint: run/checkpoints/step-00000002" in got.err
    assert got.state(2) and [path.name for path in (got.run_dir / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_model_that_does_not_fit_is_refused_with_the_largest_that_does(run, text, tmp_path, monkeypatch):
    here = Machine(name="test", cpu_cores=2, host_bytes=16 << 30, host_limit_source="test")
    monkeypatch.setattr(machine, "detect", lambda *_, **__: here)
    names = text()
    before = tree(tmp_path)
    got = run("--model", "120b", "--data", *names, "--seq", 1024, "--batch", 1)
    assert got.code == 2 and got.out.startswith("plan  120b: ") and "masters" in got.out and tree(tmp_path) == before
    said = re.fullmatch(r"error: --model 120b: ([\d.]+) TiB of host memory missing; the largest model that fits is --model (\S+)\n",
                        got.err)
    # 12 bytes a parameter are wanted, and gradients beside them
    missing, largest = said.groups()
    assert 1.3 < float(missing) < 2.0
    assert run("--model", largest, "--data", *names, "--seq", 1024, "--batch", 1, "--plan").code == 0
    larger = list(PRESETS)[list(PRESETS).index(largest) + 1]
    assert run("--model", larger, "--data", *names, "--seq", 1024, "--batch", 1, "--plan").code == 2
