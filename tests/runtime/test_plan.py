"""The plan's tables are what is allocated; what is free is used; what does not fit is refused by name."""
import dataclasses

import pytest
import torch

from model import reference
from model.config import PRESETS, preset
from model.errors import UserError
from model.flops import KEEPS
from model.layout import num_params
from runtime.host import PAGE_BYTES
from runtime.machine import Machine
from runtime.plan import STATE_BYTES, Request, host_table, make_plan, refuse_unless_fits
from runtime.state import unit_layouts
from tests.models import TINY, VARIANTS
from tests.runtime.make import MACHINE, trainer

GPU = Machine(name="test", cpu_cores=16, host_bytes=128 << 30, host_limit_source="test", gpu_name="a GPU", hbm_bytes=140 << 30,
              hbm_free_bytes=139 << 30, capability=(9, 0))
TIED = dataclasses.replace(TINY, tied=True)


def plan_on(machine, c, *, T=24, rows=4, micro_rows=1, precision="fp32", clip="exact", device="cpu", resident=0):
    return make_plan(Request(c, T, rows, micro_rows, precision, "bf16", clip, device, resident=resident), machine, reference)


@pytest.mark.parametrize("clip", ["exact", "layer"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("c", [TINY, TIED, VARIANTS["both"]], ids=["plain", "tied", "both"])
def test_the_tables_are_what_is_allocated(c, precision, clip):
    with trainer(c, rows=3, precision=precision, clip=clip) as made:
        plan, taken = made.plan, made.memory.table
        assert made.arena.used_bytes == made.arena.num_bytes == sum(plan.device.values()) and made.arena.table == plan.device
        assert sum(taken.values()) == sum(size for name, size in plan.host.items() if name != "reserve")
        masters = taken["w"] if precision == "fp32" else taken["hi"] + taken["lo"]
        assert plan.host["masters"] == masters and plan.host["moments"] == taken["m"] + taken["v"]


@pytest.mark.parametrize("clip", ["exact", "layer"])
def test_training_allocates_nothing_that_the_plan_does_not_list(clip):
    with trainer(TINY, clip=clip) as made:
        before, pinned = dict(made.memory.table), made.memory.pinned_bytes
        assert made.arena.used_bytes == made.arena.num_bytes
        from_the_plan = {t.untyped_storage().data_ptr() for t in tensors_of(made.engine.buffers)}
        assert len(from_the_plan) == 1 and made.memory.table == before and made.memory.pinned_bytes == pinned


def tensors_of(thing):
    """All tensors in nested lists, dicts and dataclasses."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if dataclasses.is_dataclass(thing):
        thing = vars(thing)
    if isinstance(thing, dict):
        thing = list(thing.values())
    return [t for each in thing for t in tensors_of(each)] if isinstance(thing, list) else []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("c", PRESETS.values(), ids=PRESETS)
def test_state_is_12_bytes_a_parameter(c, precision):
    layouts = unit_layouts(c)
    plan = plan_on(GPU, c, T=64, precision=precision, device="cuda")
    state = plan.host["masters"] + plan.host["moments"]
    padded = STATE_BYTES * sum(layout.numel for layout in layouts)
    # four regions at most, each unit rounded to pages
    assert STATE_BYTES == 12 and padded <= state <= padded + 4 * PAGE_BYTES * len(layouts)
    # every tensor starts on 128 elements: padding is nothing beside the matrices
    assert padded <= STATE_BYTES * num_params(c) + STATE_BYTES * 128 * sum(len(layout.tensors) for layout in layouts)


def test_keep_is_chosen_when_memory_is_small():
    """From nothing to everything as memory grows; whatever is chosen fits."""
    none = plan_on(dataclasses.replace(MACHINE, host_bytes=0), TINY)
    all_ = plan_on(MACHINE, TINY)
    least = none.missing["host memory"]
    assert not any(none.shape.keep) and all(keep == set(KEEPS) for keep in all_.shape.keep)
    most = sum(all_.host.values()) + sum(all_.device.values())
    before = -1
    for host_bytes in range(least, most + 20000, 1000):
        plan = plan_on(dataclasses.replace(MACHINE, host_bytes=host_bytes), TINY)
        kept = sum(plan.device.values())
        assert not plan.missing, f"{host_bytes - least} bytes more than the least are planned beyond"
        before = max(before, kept)
    assert before == sum(all_.device.values())
    assert "host memory" in plan_on(dataclasses.replace(MACHINE, host_bytes=least - 1), TINY).missing


def test_first_kept_is_what_saves_the_most_flops_a_byte():
    """An attention output costs its width and saves attention; q, k, v cost more and save one projection."""
    c = preset("qwen2.5-7b")
    for hbm in range(20, 139, 8):
        plan = plan_on(dataclasses.replace(GPU, hbm_free_bytes=hbm << 30), c, T=32768, rows=2, precision="bf16", device="cuda")
        for keep in plan.shape.keep:
            assert "projections" not in keep or "attention" in keep


def test_refusal_names_the_missing_memory_and_the_largest_preset_that_fits():
    plan = plan_on(GPU, preset("llama3-70b"), T=4096, rows=8, micro_rows=None, precision="bf16", device="cuda")
    with pytest.raises(UserError, match=r"^--model llama3-70b: .* of host memory missing; "
                                        r"the largest model that fits is --model qwen3-8b$") as refused:
        refuse_unless_fits(plan, reference)
    assert "\n" not in str(refused.value)
    fits = plan_on(GPU, preset("qwen3-8b"), T=4096, rows=8, micro_rows=None, precision="bf16", device="cuda")
    refuse_unless_fits(fits, reference)
    larger = [c for c in PRESETS.values() if num_params(c) > num_params(preset("qwen3-8b"))]
    assert all(plan_on(GPU, c, T=4096, rows=8, micro_rows=None, precision="bf16", device="cuda").missing for c in larger)


def test_refusal_names_both_memories_and_that_nothing_fits():
    small = dataclasses.replace(GPU, host_bytes=1 << 30, hbm_free_bytes=1 << 30)
    plan = plan_on(small, preset("llama3-8b"), T=4096, rows=8, micro_rows=None, precision="bf16", device="cuda")
    assert plan.missing["host memory"] == sum(plan.host.values()) - small.host_bytes
    assert plan.missing["HBM"] == sum(plan.device.values()) - small.hbm_free_bytes
    with pytest.raises(UserError, match="of host memory and .* of HBM missing; no preset fits"):
        refuse_unless_fits(plan, reference)


def test_a_step_that_does_not_divide_and_a_sequence_that_is_too_long_are_refused_by_flag():
    with pytest.raises(UserError, match="--micro-batch 3: a step of --batch 4"):
        plan_on(MACHINE, TINY, micro_rows=3)
    with pytest.raises(UserError, match="--seq 65: .* at most --seq 64"):
        plan_on(MACHINE, TINY, T=65)


@pytest.mark.parametrize(("rows", "T"), [(1, 64), (6, 64), (7, 48), (4096, 1)])
def test_micro_batches_cover_the_step(rows, T):
    shape = plan_on(dataclasses.replace(MACHINE, host_bytes=64 << 30), TINY, T=T, rows=rows, micro_rows=None).shape
    assert shape.micro_batches * shape.micro_rows == rows


def test_exact_clipping_has_a_slab_for_each_unit_and_layer_clipping_a_few():
    c = preset("qwen2.5-7b")
    plans = {clip: plan_on(GPU, c, T=64, precision="bf16", clip=clip, device="cuda") for clip in ("exact", "layer", "none")}
    assert plans["exact"].num_slabs == c.layers + 2 and plans["layer"].num_slabs == plans["none"].num_slabs < 8
    # 2 bytes a parameter of bf16 gradients
    grads = host_table(plans["exact"].shape, "exact", c.layers + 2)["slabs"]
    assert grads >= 2 * num_params(c)
    assert plans["layer"].host["slabs"] < grads


def test_resident_units_are_chosen_where_they_shorten_the_step_and_fit():
    """14B whole does not fit the host, and does with its first units in HBM."""
    def free(c, **changes):
        return plan_on(dataclasses.replace(GPU, **changes), c, T=4096, rows=8, micro_rows=None, precision="bf16", device="cuda",
                       resident=None)
    large = preset("qwen2.5-14b")
    assert plan_on(GPU, large, T=4096, rows=8, micro_rows=None, precision="bf16", device="cuda").missing
    plan = free(large)
    assert not plan.missing and 0 < len(plan.shape.resident) < large.layers and plan.shape.resident == set(range(len(plan.shape.resident)))
    for hbm in (8, 16, 32, 64, 139):
        plan = free(preset("qwen2.5-7b"), hbm_free_bytes=hbm << 30)
        fewer = [plan_on(dataclasses.replace(GPU, hbm_free_bytes=hbm << 30), preset("qwen2.5-7b"), T=4096, rows=8, micro_rows=None,
                         precision="bf16", device="cuda", resident=n) for n in (0, 4, 9)]
        assert all(plan.step_s <= other.step_s for other in fewer if not other.missing)


def test_a_model_that_is_all_resident_leaves_nothing_on_the_host():
    c = preset("smollm2-135m")
    plan = plan_on(GPU, c, T=64, precision="bf16", device="cuda", resident=c.layers + 2)
    assert plan.host["masters"] == plan.host["moments"] == plan.host["slabs"] == 0 and not plan.missing
    # 12 bytes of state and 2 of gradient a parameter
    assert plan.device["resident state"] + plan.device["resident gradients"] >= 14 * num_params(c)


def test_more_resident_units_than_there_are_is_refused_by_flag():
    with pytest.raises(UserError, match=r"^--resident 6: test has 5 units \(embedding, 3 layers, head\)$"):
        plan_on(MACHINE, TINY, resident=6)


@pytest.mark.parametrize("resident", [1, 3, 5])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_tables_hold_with_resident_units(resident, precision):
    with trainer(TIED, precision=precision, resident=resident) as made:
        plan, taken = made.plan, made.memory.table
        arenas = [arena.used_bytes for arena in made.arenas]
        assert sum(arenas) == sum(plan.device.values()) and arenas == [arena.num_bytes for arena in made.arenas]
        assert sum(taken.values()) == sum(size for name, size in plan.host.items() if name != "reserve")
