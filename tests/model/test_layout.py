"""Offsets come from one map, for whoever writes and whoever reads."""
import dataclasses
import itertools
import math

import pytest
import torch

from model.config import PRESETS
from model.layout import OFFSET_ELEMENTS, Layout, block_layout, embedding_layout, head_layout, num_params
from tests.models import TINY, VARIANTS

SHAPES = {**VARIANTS, **PRESETS}


def layouts_of(c):
    return [embedding_layout(c), block_layout(c), head_layout(c)]


@pytest.mark.parametrize("c", SHAPES.values(), ids=SHAPES)
def test_tensors_are_aligned_and_tile_the_buffer_with_the_gaps(c):
    for layout in layouts_of(c):
        pieces = sorted([(span.offset, span.end) for span in layout.tensors.values()] + layout.gaps())
        assert pieces[0][0] == 0 and pieces[-1][1] == layout.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces)), "a hole or an overlap"
        assert all(span.offset % OFFSET_ELEMENTS == 0 for span in layout.tensors.values())
        assert layout.num_params == sum(math.prod(span.shape) for span in layout.tensors.values())


@pytest.mark.parametrize("c", SHAPES.values(), ids=SHAPES)
def test_decay_begins_where_matrices_do(c):
    for layout in layouts_of(c):
        for name, span in layout.tensors.items():
            assert (span.offset >= layout.decay_from) == (len(span.shape) == 2), name


@pytest.mark.parametrize("c", SHAPES.values(), ids=SHAPES)
def test_q_k_v_and_gate_up_are_one_matrix_each(c):
    layout = block_layout(c)
    w = layout.bind(torch.empty(layout.numel, device="meta"))
    assert w.view("qkv").shape == (c.qkv_width, c.hidden) and w.view("gate_up").shape == (2 * c.ffn, c.hidden)
    assert w.ptr("qkv") == w.ptr("q") and w.ptr("gate_up") == w.ptr("gate")
    assert w.ptr("k") == w.ptr("q") + 4 * c.attention_width * c.hidden and w.ptr("up") == w.ptr("gate") + 4 * c.ffn * c.hidden


def test_addresses_are_those_of_the_views():
    for dtype in (torch.bfloat16, torch.float32):
        layout = block_layout(VARIANTS["both"])
        w = layout.bind(torch.zeros(layout.numel, dtype=dtype))
        for name in (*layout.tensors, "qkv", "gate_up"):
            assert w.ptr(name) == w.view(name).data_ptr() and w.view(name).is_contiguous(), name
            assert (w.ptr(name) - w.flat.data_ptr()) % 256 == 0


def test_what_a_layer_does_not_have_has_no_address_and_no_view():
    layout = block_layout(TINY)
    w = layout.bind(torch.zeros(layout.numel))
    assert w.ptr("qkv_bias") == 0 and w.view("q_norm") is None


def test_binding_another_size_or_a_stride_is_refused():
    layout = block_layout(TINY)
    for flat in (torch.zeros(layout.numel + 1), torch.zeros(2 * layout.numel)[::2]):
        with pytest.raises(ValueError, match=f"flat: .* wanted {layout.numel}, contiguous"):
            layout.bind(flat)


def test_a_group_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="ab: .* not one matrix in memory"):
        Layout({}, {"a": (3, 5), "b": (3, 5)}, {"ab": ("a", "b")})


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_matrix_counts_once(tied):
    c = dataclasses.replace(TINY, tied=tied)
    assert ("head" in head_layout(c)) != tied
    block = 2 * 64 + (4 + 2 + 2) * 16 * 64 + 64 * 64 + 3 * 48 * 64
    assert num_params(c) == 3 * block + 64 + (1 if tied else 2) * 131 * 64
