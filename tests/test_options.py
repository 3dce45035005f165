"""Flags, their defaults, and what a resumed run takes over."""
import dataclasses
import math
import re

import pytest

from model.config import PRESETS
from model.errors import UserError
from runtime.options import _COMMON, _LARGE, _TINY, FIXED, MAX_SEED, Options, parser, resolve


def options(*flags, saved=None, has_gpu=False):
    return resolve(parser().parse_args([str(flag) for flag in flags]), saved, has_gpu)


def saved(*flags, has_gpu=False):
    return dataclasses.asdict(options(*flags, has_gpu=has_gpu)[0])


def refusal(*flags, **more):
    with pytest.raises(UserError) as refused:
        options(*flags, **more)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def actions():
    return {action.dest: action for action in parser()._actions}


def test_every_option_has_a_flag_with_help():
    flags = actions()
    for field in dataclasses.fields(Options):
        assert flags[field.name].help and flags[field.name].default is None, field.name
    # defaults are in one table, and each is there once
    assert {*_COMMON} | {*_TINY} | {"model", "device", "precision"} == {field.name for field in dataclasses.fields(Options)}
    assert {*_TINY} == {*_LARGE} and not {*_TINY} & {*_COMMON}


def test_help_says_the_defaults_that_hold():
    def number(text):
        return float(re.fullmatch(r"[\d.e-]+", text)[0])
    for name in _TINY:
        tiny, large = re.search(r"\(tiny (\S+), others (\S+)\)", actions()[name].help).groups()
        assert (number(tiny), number(large)) == (_TINY[name], _LARGE[name]), name
    for name, value in _COMMON.items():
        last = re.search(r"\(([^()]*)\)$", actions()[name].help)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert number(re.match(r"[\d.e-]+", last[1])[0]) == value, name
        elif isinstance(value, str):
            assert last[1].split(",")[0].split(";")[0] == value, name


def test_defaults_are_those_of_the_model_and_the_machine():
    tiny, changes = options()
    assert (tiny.model, tiny.seq, tiny.lr) == ("tiny", _TINY["seq"], _TINY["lr"])
    assert (tiny.device, tiny.precision, changes) == ("cpu", "fp32", [])
    large, _ = options("--model", "llama3-8b", has_gpu=True)
    assert (large.seq, large.lr, large.device, large.precision) == (_LARGE["seq"], _LARGE["lr"], "cuda", "bf16")
    assert options("--device", "cpu", has_gpu=True)[0].precision == "fp32"
    assert options("--precision", "bf16")[0].precision == "bf16" and not options("--no-pack", "--no-save")[0].pack


def test_tokens_are_whole_steps_rounded_up():
    for tokens, steps in ((1, 1), (16, 1), (17, 2), (48, 3)):
        assert options("--tokens", tokens, "--seq", 8, "--batch", 2)[0].steps == steps
    assert refusal("--tokens", 100, "--steps", 1).startswith("--tokens and --steps both given")
    assert refusal("--tokens", 0) == "--tokens 0: at least 1" and refusal("--tokens", -5) == "--tokens -5: at least 1"
    # what is wrong with a row is said, not divided by
    assert refusal("--tokens", 100, "--batch", 0) == "--batch 0: at least 1"


@pytest.mark.parametrize("name", ["seq", "batch", "steps", "log_every", "keep_checkpoints", "micro_batch", "threads"])
def test_counts_are_at_least_1(name):
    flag = "--" + name.replace("_", "-")
    for value in (0, -1):
        assert refusal(flag, value) == f"{flag} {value}: at least 1"
    assert getattr(options(flag, 1)[0], name) == 1


@pytest.mark.parametrize("name", ["lr", "warmup", "weight_decay", "eval_every", "save_every", "sample", "seed"])
def test_these_are_at_least_0(name):
    flag = "--" + name.replace("_", "-")
    assert refusal(flag, -1).startswith(f"{flag} -1") and getattr(options(flag, 0)[0], name) == 0


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps", "max_norm", "beta1", "beta2"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_numbers_are_finite(name, value):
    flag = "--" + name.replace("_", "-")
    assert refusal(f"{flag}={value}").startswith(f"{flag} {value}: ")


def test_eps_and_max_norm_are_above_0():
    # eps 0: m / sqrt(v) is 0 / 0 where no gradient ever came
    assert refusal("--eps", 0) == "--eps 0.0: above 0, and finite"
    assert refusal("--max-norm", 0) == "--max-norm 0.0: above 0, and finite; --clip none does not clip"
    assert refusal("--beta1", 1) == "--beta1 1.0: from 0 to below 1"


def test_a_seed_has_32_bits():
    assert options("--seed", MAX_SEED)[0].seed == MAX_SEED
    assert refusal("--seed", MAX_SEED + 1) == "--seed 4294967296: at most 4294967295"
    # every unit of the deepest model gets a seed that torch takes
    assert MAX_SEED * 1_000_003 + max(c.layers for c in PRESETS.values()) + 2 < 1 << 64


def test_an_unknown_model_gets_the_nearest_names():
    assert refusal("--model", "qwen2.5-7").startswith("--model qwen2.5-7: no such model; did you mean qwen2.5-7b")


@pytest.mark.parametrize("flags", [["--no-such-flag"], ["--seq", "many"], ["--clip", "some"], ["--data"]], ids=" ".join)
def test_what_is_no_flag_is_refused_with_2(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(flags)
    assert stopped.value.code == 2 and flags[0] in capsys.readouterr().err


# resumed runs

def test_CKPT8_a_resumed_run_goes_on_with_its_own_choices():
    before = saved("--lr", 1e-3, "--seq", 64, "--steps", 7, "--clip", "layer", "--no-pack", "--sample", 0)
    now, changes = options("--resume", "run", saved=before)
    assert dataclasses.asdict(now) == before and changes == []


def test_CKPT8_changes_are_old_to_new():
    before = saved("--lr", 1e-3, "--steps", 7, "--seq", 8, "--batch", 2)
    now, changes = options("--resume", "run", "--lr", 2e-3, "--steps", 9, "--wandb", "off", saved=before)
    assert changes == ["lr: 0.001 -> 0.002", "steps: 7 -> 9", "wandb: offline -> off"] and (now.lr, now.steps) == (2e-3, 9)
    assert options("--resume", "run", "--tokens", 8 * 2 * 8, saved=before)[1] == ["steps: 7 -> 8"]
    # given again and the same: no change
    assert options("--resume", "run", "--lr", 1e-3, saved=before)[1] == []


@pytest.mark.parametrize(("name", "flags"), [
    ("model", ["--model", "smollm2-135m"]), ("seq", ["--seq", 8]), ("batch", ["--batch", 2]), ("pack", ["--no-pack"]),
    ("seed", ["--seed", 2]), ("precision", ["--precision", "bf16"])])
def test_CKPT12_another_run_is_refused(name, flags):
    said = refusal("--resume", "run", *flags, saved=saved())
    assert said.startswith("--resume run: that is another run (") and f"{name}: " in said and " -> " in said
    assert name in FIXED


def test_CKPT12_another_machine_is_no_other_run():
    before = saved("--threads", 16, "--micro-batch", 4, "--host-memory", "1TiB", has_gpu=True)
    now, changes = options("--resume", "run", "--micro-batch", 2, "--threads", 1, saved=before)
    assert (now.device, now.precision, now.micro_batch, now.threads, now.host_memory) == ("cpu", "bf16", 2, 1, None)
    assert changes == ["device: cuda -> cpu", "host_memory: 1TiB -> None", "micro_batch: 4 -> 2", "threads: 16 -> 1"]
