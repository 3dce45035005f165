"""The engine on our kernels and real CUDA streams."""
import dataclasses

import pytest
import torch

from model.config import ModelConfig
from runtime.host import CudaPinner
from runtime.machine import detect
from runtime.plan import Request, make_plan
from runtime.streams import CudaStream, cuda_streams
from runtime.trainer import Trainer, choose_ops
from tests.runtime.make import adamw, batches, masters, same, train

pytestmark = pytest.mark.gpu

SMALL = ModelConfig("small", layers=5, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1408, vocab=4099, max_positions=1024)
STEPS, ROWS, T = 4, 4, 384


def run(c=SMALL, *, micro_rows=1, slots=2, streams=None, precision="bf16", clip="exact", resident=0):
    """Results and masters after a few steps on the GPU."""
    machine = dataclasses.replace(detect(), hbm_free_bytes=8 << 30)
    ops = choose_ops("cuda", precision)
    plan = make_plan(Request(c, T, ROWS, micro_rows, precision, "bf16", clip, "cuda", slots, resident), machine, ops)
    made = Trainer(plan, adamw(clip=clip, lr=1e-3), ops, streams or cuda_streams(), CudaPinner(), threads=4)
    try:
        made.state.initialize(0)
        steps = batches(c, STEPS, rows=ROWS // micro_rows, T=T * micro_rows)
        return train(made, steps), masters(made)
    finally:
        made.close()


def test_NUM6_the_same_run_twice():
    a, b = run(), run()
    assert [r.loss for r in a[0]] == [r.loss for r in b[0]]
    assert same(a[1], b[1])


@pytest.mark.parametrize("slots", [3, SMALL.layers])
def test_streamed_equals_resident_weights(slots):
    assert same(run()[1], run(slots=slots)[1])


@pytest.mark.parametrize("clip", ["exact", "layer", "none"])
@pytest.mark.parametrize("c", [SMALL, dataclasses.replace(SMALL, tied=True, qkv_bias=True)], ids=["plain", "tied"])
def test_OPT10_any_number_of_resident_units_gives_the_bits_of_none(c, clip):
    results, host = run(c, clip=clip)
    for resident in (1, 4, c.layers + 2):
        mixed, state = run(c, clip=clip, resident=resident)
        assert [(r.loss, r.grad_norm) for r in mixed] == [(r.loss, r.grad_norm) for r in results]
        assert same(state, host), resident


class SlowCopies(CudaStream):
    """Each copy waits behind some milliseconds of other work on its stream."""

    def copy(self, dst, src):
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(10_000_000)
        super().copy(dst, src)


@pytest.mark.parametrize("late", ["h2d", "d2h"])
def test_late_copies_change_no_bit(late):
    streams = cuda_streams()
    slow = getattr(streams, late)
    slow = SlowCopies(slow.name, slow.clock, slow.stream)
    assert same(run()[1], run(streams=dataclasses.replace(streams, **{late: slow}))[1])


@pytest.mark.parametrize("c", [SMALL, dataclasses.replace(SMALL, tied=True, qkv_bias=True, qk_norm=True)], ids=["plain", "all options"])
def test_kernels_train_as_the_reference_in_fp32_does(c):
    kernels, oracle = run(c)[0], run(c, precision="fp32")[0]
    for ours, exact in zip(kernels, oracle, strict=True):
        # a bf16 step: losses agree to its rounding of logits, some 1e-3 of a nat
        assert abs(ours.loss - exact.loss) < 4e-3 * exact.loss
        assert abs(ours.grad_norm - exact.grad_norm) < 2e-2 * exact.grad_norm


@pytest.mark.parametrize("clip", ["layer", "none"])
def test_updates_during_backward_train_too(clip):
    losses = [r.loss for r in run(clip=clip)[0]]
    assert all(x > 0 for x in losses)
    assert same(run(clip=clip)[1], run(clip=clip)[1])


def test_the_steady_state_allocates_nothing():
    machine = dataclasses.replace(detect(), hbm_free_bytes=8 << 30)
    ops = choose_ops("cuda", "bf16")
    plan = make_plan(Request(SMALL, T, ROWS, 1, "bf16", "bf16", "exact", "cuda", resident=3), machine, ops)
    made = Trainer(plan, adamw(), ops, cuda_streams(), CudaPinner(), threads=4)
    try:
        made.state.initialize(0)
        steps = batches(SMALL, STEPS, rows=ROWS, T=T)
        train(made, steps)
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        train(made, steps)
        assert torch.cuda.memory_stats()["segment.all.allocated"] == before
    finally:
        made.close()
