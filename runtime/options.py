"""The flags of train.py: one table of defaults, and what a resumed run takes from its first start. Needs no torch."""
import argparse
import dataclasses
import math
from typing import Any

from model.config import PRESETS, preset
from model.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """Every choice of a run, resolved; help texts are in `parser`."""
    model: str
    data: list[str] | None
    seq: int
    batch: int
    micro_batch: int | None
    pack: bool
    steps: int
    lr: float
    schedule: str
    warmup: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: str
    max_norm: float
    precision: str
    grads: str
    seed: int
    device: str
    resident: int | None
    host_memory: str | None
    threads: int | None
    eval_every: int
    log_every: int
    save: bool
    save_every: int
    keep_checkpoints: int
    sample: int
    wandb: str


# the small model is for trying things: short rows, a high learning rate, a minute; the others are for training
_TINY = dict(seq=128, batch=16, steps=230, lr=4e-3, warmup=20, sample=160)
_LARGE = dict(seq=4096, batch=8, steps=1000, lr=3e-4, warmup=50, sample=0)
_COMMON = dict(data=None, micro_batch=None, pack=True, schedule="cosine", weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8,
               clip="exact", max_norm=1.0, grads="bf16", seed=1, resident=None, host_memory=None, threads=None, eval_every=0, log_every=1,
               save=True, save_every=0, keep_checkpoints=2, wandb="offline")

# a run that is resumed goes on with these or is another run; its text too, by content (runtime/checkpoint.check_same_run)
FIXED = ("model", "seq", "batch", "pack", "seed", "precision")
# weights are drawn from seed * 1,000,003 + unit, which has to stay below 2^64
MAX_SEED = (1 << 32) - 1


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="train.py", description="Trains a decoder language model on one GPU (or a CPU), its state in host "
                                "memory.", formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110))
    p.add_argument("--list-models", action="store_true", help="print the presets with parameters and bytes, and exit")
    p.add_argument("--plan", action="store_true", help="print the plan and exit; 2 if it does not fit")
    p.add_argument("--resume", metavar="RUN", help="go on with this run directory's newest checkpoint; flags override its own")
    p.add_argument("--run", metavar="DIR", help="run directory to make (default: runs/MODEL-TIME)")

    def group(title: str, **flags: tuple[type | tuple[str, ...], str]) -> None:
        g = p.add_argument_group(title)
        for name, (kind, text) in flags.items():
            given = dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind, metavar=kind.__name__.upper()[0])
            g.add_argument("--" + name.replace("_", "-"), default=None, help=text, **given)
    group("model and data", model=(str, f"one of {', '.join(PRESETS)} (tiny)"),
          seq=(int, "tokens in a sequence (tiny 128, others 4096)"), seed=(int, "of weights, order and sampling (1)"))
    p.add_argument("--data", nargs="+", default=None, metavar="FILE", help="UTF-8 text, one document a file (the sources of Python's "
                   "standard library)")
    p.add_argument("--no-pack", dest="pack", action="store_false", default=None, help="a row holds one document and padding")
    group("step", batch=(int, "sequences a step (tiny 16, others 8)"), micro_batch=(int, "sequences that pass a layer together (planned)"),
          steps=(int, "steps of the whole run (tiny 230, others 1000)"), tokens=(int, "the same in tokens, instead of --steps"))
    group("update", lr=(float, "highest learning rate (tiny 4e-3, others 3e-4)"),
          schedule=(("cosine", "linear", "wsd", "constant"), "after the warm-up (cosine, to 0)"),
          warmup=(int, "steps of linear warm-up (tiny 20, others 50)"), weight_decay=(float, "of matrices, times the learning rate (0.1)"),
          beta1=(float, "AdamW (0.9)"), beta2=(float, "AdamW (0.95)"), eps=(float, "AdamW (1e-8)"),
          clip=(("exact", "layer", "none"), "norm over the whole gradient, over each layer, or no clipping (exact)"),
          max_norm=(float, "gradients are scaled down to this norm (1.0)"))
    group("machine", device=(("cpu", "cuda"), "where to compute (cuda if there is one)"),
          precision=(("bf16", "fp32"), "working weights and activations (bf16 on a GPU, fp32 on a CPU); masters are fp32"),
          resident=(int, "units whose state stays in HBM, from the embedding on (planned)"),
          grads=(("bf16", "fp32"), "in which gradients leave the device (bf16; fp32 with --precision fp32)"),
          host_memory=(str, "bytes this run may use, as 128GiB or 1.5TB (what the machine has free)"),
          threads=(int, "of the CPU's AdamW (cores - 2, at least 1)"))
    group("report", eval_every=(int, "steps between validations (0: at the end)"),
          log_every=(int, "steps that a loss in metrics.jsonl covers (1)"),
          sample=(int, "tokens to generate at the end (tiny 160, others 0)"), save_every=(int, "steps between checkpoints (0: at the end)"),
          keep_checkpoints=(int, "newest checkpoints to keep (2)"),
          wandb=(("offline", "online", "off"), "mirror of metrics.jsonl in Weights & Biases (offline)"))
    p.add_argument("--no-save", dest="save", action="store_false", default=None, help="write no checkpoint")
    return p


def resolve(given: argparse.Namespace, saved: dict[str, Any] | None, has_gpu: bool) -> tuple[Options, list[str]]:
    """Options from the flags, else from the run that is resumed, else the defaults; and "name: old -> new" of what a
    resumed run changes. UserError for values that make no sense, and for a change that makes it another run."""
    flags = {field.name: getattr(given, field.name) for field in dataclasses.fields(Options)}
    flags = {name: value for name, value in flags.items() if value is not None}
    model = flags.get("model") or (saved or {}).get("model") or "tiny"
    preset(model)
    device = flags.get("device") or ("cuda" if has_gpu else "cpu")
    defaults = _COMMON | (_TINY if model == "tiny" else _LARGE) | dict(model=model, device=device)
    defaults["precision"] = "bf16" if device == "cuda" else "fp32"
    if saved:
        # where it runs may change between two starts
        defaults |= {name: saved[name] for name in saved if name not in ("device", "resident", "host_memory", "threads", "micro_batch")}
    values = defaults | flags
    if given.tokens is not None:
        if given.steps is not None:
            raise UserError("--tokens and --steps both given; one of them decides how long the run is")
        if given.tokens < 1:
            raise UserError(f"--tokens {given.tokens}: at least 1")
        # of what is below 1, _check tells
        values["steps"] = -(-given.tokens // max(values["batch"] * values["seq"], 1))
    _check(values)
    changes = [f"{name}: {saved[name]} -> {values[name]}" for name in sorted(saved or {}) if saved[name] != values[name]]
    other = [change for change in changes if change.split(":")[0] in FIXED]
    if other:
        raise UserError(f"--resume {given.resume}: that is another run ({'; '.join(other)}); start a new one without --resume")
    return Options(**values), changes


def _check(values: dict[str, Any]) -> None:
    for name in ("seq", "batch", "steps", "log_every", "keep_checkpoints", "micro_batch", "threads"):
        if values[name] is not None and values[name] < 1:
            raise UserError(f"{_flag(name)} {values[name]}: at least 1")
    for name in ("lr", "warmup", "weight_decay", "eval_every", "save_every", "sample", "seed"):
        if not 0 <= values[name] < math.inf:
            raise UserError(f"{_flag(name)} {values[name]}: at least 0" + ", and finite" * isinstance(values[name], float))
    if values["resident"] is not None and values["resident"] < 0:
        raise UserError(f"--resident {values['resident']}: at least 0")
    if values["seed"] > MAX_SEED:
        raise UserError(f"--seed {values['seed']}: at most {MAX_SEED}")
    for name in ("beta1", "beta2"):
        if not 0 <= values[name] < 1:
            raise UserError(f"{_flag(name)} {values[name]}: from 0 to below 1")
    # eps 0: a parameter whose gradients were all 0 would get 0 / 0
    for name, hint in (("eps", ""), ("max_norm", "; --clip none does not clip")):
        if not 0 < values[name] < math.inf:
            raise UserError(f"{_flag(name)} {values[name]}: above 0, and finite{hint}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
