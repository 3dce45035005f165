"""A trainer on the CPU for tests: small, with whatever streams a test brings."""
import contextlib

import torch

from model import reference
from runtime.host import NoPinner
from runtime.machine import Machine
from runtime.optimizer import AdamW, Schedule
from runtime.plan import Request, make_plan
from runtime.streams import cpu_streams
from runtime.trainer import Trainer
from tests.models import packed

MACHINE = Machine(name="test", cpu_cores=2, host_bytes=8 << 30, host_limit_source="test", gpu_name=None, hbm_bytes=0, hbm_free_bytes=0,
                  capability=None)


def adamw(**changes):
    settings = dict(lr=1e-2, kind="constant", warmup=0, steps=10) | {k: changes.pop(k) for k in list(changes) if k in ("lr", "kind", "warmup", "steps")}
    return AdamW(Schedule(**settings), **changes)


@contextlib.contextmanager
def trainer(c, *, T=24, rows=2, micro_rows=1, precision="fp32", grads="bf16", slots=2, streams=None, threads=1, seed=0, keep=None, **adam):
    """A trainer with random weights; closed at the end."""
    settings = adamw(**adam)
    request = Request(c, T, rows, micro_rows, precision, grads, settings.clip, "cpu", slots)
    plan = make_plan(request, MACHINE, reference)
    if keep is not None:
        import dataclasses

        from runtime.plan import device_table
        shape = dataclasses.replace(plan.shape, keep=(frozenset(keep),) * c.layers)
        plan = dataclasses.replace(plan, shape=shape, device=device_table(shape, "cpu"))
    made = Trainer(plan, settings, reference, streams or cpu_streams(), NoPinner(), threads)
    try:
        made.state.initialize(seed)
        yield made
    finally:
        made.close()


def batches(c, steps, rows=2, T=24, seed=0):
    """`steps` lists of `rows` micro-batches of T tokens, each in two documents, a few labels masked."""
    return [[packed([T // 3, T - T // 3], c.vocab, seed + 100 * s + r, masked=0.2) for r in range(rows)] for s in range(steps)]


def supervised(micro_batches):
    return sum(int((b.labels >= 0).sum()) for b in micro_batches)


def train(made, steps):
    """Results of the steps, the state settled."""
    results = [made.step(micro_batches, supervised(micro_batches)) for micro_batches in steps]
    made.engine.settle()
    return results


def masters(made):
    made.engine.settle()
    return [made.state.master(u).clone() for u in range(len(made.state.layouts))]


def same(a, b):
    """Bitwise, NaN equal to NaN of the same bits."""
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))
