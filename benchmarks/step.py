"""Time of a whole training step: forward, backward, clip, AdamW, everything streamed.

    python -m benchmarks.step --model qwen2.5-7b --batch 8
    python -m benchmarks.step --hidden 5120 --heads 40 --kv-heads 8 --ffn 13824 --vocab 32000 --layers 16 --batch 8

Random weights and random tokens, the same batch each step. A step's time is from one decision to the next, so what an
update leaves over for the next forward counts. Checked: the loss of random weights is ln(vocabulary) and half the
variance of their logits, it falls, and the gradient's norm is finite.

--streaming-cost measures the first batch twice more, without AdamW: once streamed as before, once with every layer in a slot of its own
and gradients that stay on the device. The difference is what streaming costs the same kernels.
"""
import argparse
import dataclasses
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import report
from data.batches import lay_out
from model.config import ModelConfig, preset
from model.flops import KEEPS, step_flops
from model.layout import num_params
from runtime.host import CudaPinner, NoPinner
from runtime.machine import detect, parse_bytes
from runtime.optimizer import AdamW, Schedule, update_threads
from runtime.plan import Request, make_plan, refuse_unless_fits
from runtime.report import stall_line
from runtime.slabs import Slabs
from runtime.state import init_std
from runtime.streams import cpu_streams, cuda_streams
from runtime.trainer import Trainer, choose_ops

WARM_UP = 2
MODES = ("train", "no update", "resident")


class NoUpdate:
    """Stands where the optimizer does and changes no weight: what a step costs without AdamW.

    refetch: weights count as new after each step, so that all of them cross the link as they do in training.
    """

    def __init__(self, optimizer, refetch: bool):
        self._state, self._refetch = optimizer.state, refetch
        self.adamw, self.updated_at = optimizer.adamw, optimizer.updated_at
        self.check, self.take_spans = optimizer.check, optimizer.take_spans

    def submit(self, unit, slab, factor, applied):
        slab.release()
        self._state.updates[unit] += self._refetch

    def wait_updated(self, unit):
        pass

    def settle(self):
        pass


class StayingSlabs(Slabs):
    """Gradients are rounded and stay on the device."""

    def send(self, stage, numel, verdict, what, stopped):
        self.streams.compute.record(stage.free)
        slab = self.slabs[self._next_slab % len(self.slabs)]
        self._next_slab += 1
        return slab


def main() -> int:
    a = parse()
    if a.model:
        config = preset(a.model)
    else:
        config = ModelConfig("shape", a.layers, a.hidden, a.heads, a.kv_heads, a.head_dim or a.hidden // a.heads, a.ffn, a.vocab,
                             max_positions=a.seq, rope_theta=1e6, qkv_bias=a.qkv_bias, qk_norm=a.qk_norm, tied=a.tied)
    facts = report.machine()
    print(" ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = a.precision or ("bf16" if device == "cuda" else "fp32")
    machine = detect(parse_bytes(a.host_memory, "--host-memory") if a.host_memory else None)
    ops = choose_ops(device, precision)
    adamw = AdamW(Schedule("constant", a.lr, 0, 1), clip=a.clip)
    plans = []
    for batch in a.batch:
        for mode in MODES if a.streaming_cost and batch == a.batch[0] else MODES[:1]:
            slots = config.layers if mode == "resident" else 2
            resident = 0 if a.streaming_cost else a.resident
            request = Request(config, a.seq, batch, a.micro_batch, precision, a.grads, a.clip, device, slots, resident)
            plan = make_plan(request, machine, ops)
            refuse_unless_fits(plan, ops)
            plans.append((plan, mode))
    trainer, runs = None, []
    try:
        for plan, mode in plans:
            print(f"{mode}\n{plan.page()}", flush=True)
            if trainer and trainer.plan.shape.resident == plan.shape.resident:
                trainer.lay_out(plan)
            else:
                if trainer:
                    trainer.close()
                    # its device memory goes before the next one's is taken
                    trainer = None
                trainer = begin(plan, adamw, ops, a.threads or update_threads(machine.cpu_cores))
            runs.append(measure(trainer, plan, a.steps, mode))
            peaks = report.peaks()
            print(runs[-1], flush=True)
    finally:
        if trainer:
            trainer.close()
    shape = dataclasses.asdict(config)
    report.finish(a.name, {"shape": shape, "parameters": num_params(config), "precision": precision, "clip": a.clip,
                           "runs": runs} | peaks, Path(a.out) if a.out else None)
    return 0


def begin(plan, adamw: AdamW, ops, threads: int) -> Trainer:
    """A trainer for the plan, its weights drawn."""
    began = time.perf_counter()
    device = plan.request.device
    trainer = Trainer(plan, adamw, ops, cuda_streams() if device == "cuda" else cpu_streams(),
                      CudaPinner() if device == "cuda" else NoPinner(), threads)
    trainer.state.initialize(1, device)
    print(f"memory taken and weights drawn in {time.perf_counter() - began:.1f} s", flush=True)
    return trainer


def measure(trainer: Trainer, plan, num_steps: int, mode: str) -> dict:
    """Runs the plan's steps in one of MODES; their median time and where it went."""
    request, shape, engine = plan.request, plan.shape, trainer.engine
    config, T = request.config, request.T
    if mode != "train":
        engine.settle()
        engine.optimizer = NoUpdate(trainer.optimizer, refetch=mode == "no update")
    if mode == "resident":
        engine.slabs = StayingSlabs(engine.slabs.slabs, engine.buffers.stages, engine.streams)
    rng = np.random.default_rng(0)
    lengths = np.full(shape.micro_rows, T)
    micro_batches = [lay_out(rng.integers(0, config.vocab, shape.N, dtype=np.int32), lengths, T).micro_batch(0, shape.micro_rows)
                     for _ in range(shape.micro_batches)]
    supervised = request.rows * (T - 1)
    results, ends = [], []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for step in range(WARM_UP + num_steps):
        results.append(trainer.step(micro_batches, supervised))
        ends.append(time.perf_counter())
        print(f"  step {step}: loss {results[-1].loss:.4f}, norm {results[-1].grad_norm:.4g}; {stall_line(results[-1].times)}", flush=True)
    check(results, config, mode == "train", trainer.state.applied_steps > len(results))
    seconds = [b - a_ for a_, b in zip(ends[WARM_UP - 1:], ends[WARM_UP:], strict=False)]
    step_s = statistics.median(seconds)
    measured = results[WARM_UP:]
    tokens = request.rows * T
    flops = step_flops(config, tokens, request.rows * T * T)

    def median(value) -> float:
        return round(statistics.median(value(r.times) for r in measured), 4)
    return {"mode": mode, "tokens": tokens, "batch": request.rows, "seq": T, "micro_batches": shape.micro_batches,
            "resident_units": len(shape.resident), "predicted_s": plan.step_s and round(plan.step_s, 4),
            "layers_that_keep": {name: sum(name in keep for keep in shape.keep) for name in KEEPS},
            "step_s": {name: round(value, 4) for name, value in report.spread(seconds).items()},
            "model_tflops": round(flops / step_s / 1e12, 1), "tokens_per_s": round(tokens / step_s),
            "exposed_s": {cause: median(lambda t, cause=cause: t.exposed[cause]) for cause in measured[0].times.exposed},
            "busy_s": {name: median(lambda t, name=name: t.busy[name]) for name in measured[0].times.busy},
            "link_gbps": {name: median(lambda t, name=name: t.moved_bytes[name] / max(t.busy[name], 1e-9) / 1e9)
                          for name in measured[0].times.moved_bytes},
            "losses": [round(r.loss, 4) for r in results], "norms": [round(r.grad_norm, 4) for r in results]}


def check(results, config: ModelConfig, updating: bool, trained_before: bool) -> None:
    """Stops the benchmark unless the steps did what steps do."""
    losses = [r.loss for r in results]
    wrong = [r for r in results if r.skipped or not math.isfinite(r.loss) or not math.isfinite(r.grad_norm)]
    # normed hidden states have length sqrt(D): logits are normal with variance D std^2
    expected = math.log(config.vocab) + config.hidden * init_std(config) ** 2 / 2
    if not trained_before and abs(losses[0] - expected) > 0.2:
        wrong.append(f"first loss {losses[0]:.3f}, random weights have {expected:.3f}")
    if updating and not losses[-1] < losses[0]:
        wrong.append(f"the loss does not fall: {losses}")
    if not updating and len(set(losses)) > 1:
        wrong.append(f"the same weights and tokens, different losses: {losses}")
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(1)


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", help="a preset; else the shape below")
    for name, value in dict(layers=16, hidden=5120, heads=40, kv_heads=8, head_dim=None, ffn=13824, vocab=32000).items():
        p.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    for name in ("qkv-bias", "qk-norm", "tied"):
        p.add_argument("--" + name, action="store_true")
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--batch", type=int, nargs="+", default=[8], help="sequences a step; several are measured one after the other")
    p.add_argument("--micro-batch", type=int)
    p.add_argument("--steps", type=int, default=5, help=f"measured, after {WARM_UP} that are not")
    p.add_argument("--lr", type=float, default=2e-6)
    p.add_argument("--clip", choices=("exact", "layer", "none"), default="exact")
    p.add_argument("--precision", choices=("bf16", "fp32"))
    p.add_argument("--grads", choices=("bf16", "fp32"), default="bf16")
    p.add_argument("--resident", type=int, help="units whose state stays in HBM (planned; 0: all state on the host)")
    p.add_argument("--streaming-cost", action="store_true", help="measure without AdamW too, streamed and resident")
    p.add_argument("--threads", type=int)
    p.add_argument("--host-memory")
    p.add_argument("--name", default="step", help="first part of the result's file name")
    p.add_argument("--out", help="folder of the result (benchmarks/results)")
    return p.parse_args()


if __name__ == "__main__":
    sys.exit(main())
