"""Presets are the published models; a shape that cannot be built is refused by the name of its field."""
import dataclasses

import pytest

from model.config import PRESETS, preset
from model.errors import UserError
from model.flops import KEEPS, keep_bytes, recompute_flops, step_flops
from model.layout import num_params
from tests.models import TINY, VARIANTS

# parameters of the published checkpoints
PUBLISHED = {"smollm2-135m": 134_515_008, "qwen2.5-7b": 7_615_616_512, "llama3-8b": 8_030_261_248, "qwen3-8b": 8_190_735_360,
             "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "llama3-70b": 70_553_706_496,
             "qwen2.5-72b": 72_706_203_648}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert num_params(preset(name)) == PUBLISHED[name]


def test_120b_has_119_8_billion_parameters():
    assert round(num_params(preset("120b")) / 1e9, 1) == 119.8


@pytest.mark.parametrize("c", [*PRESETS.values(), *VARIANTS.values()], ids=[*PRESETS, *VARIANTS])
def test_step_flops_are_three_forward_passes_of_every_matrix_and_of_causal_attention(c):
    """6 a matrix element and token; scores and values over half the square of a document; backward twice forward."""
    tokens, lengths = 8192, [4096, 1000, 3000, 96]
    matrices = c.layers * (c.hidden * (c.qkv_width + c.attention_width) + 3 * c.hidden * c.ffn) + c.vocab * c.hidden
    small = c.layers * (2 * c.hidden + c.qkv_bias * c.qkv_width + c.qk_norm * 2 * c.head_dim) + c.hidden
    attention = sum(3 * c.layers * 2 * (2 * length * length * c.attention_width) / 2 for length in lengths)
    squares = sum(length ** 2 for length in lengths)
    assert step_flops(c, tokens, squares) == 6.0 * (matrices + small) * tokens + attention


def test_the_14b_layers_attention_is_6_L_D_T_tokens():
    c = dataclasses.replace(preset("qwen2.5-14b"), layers=16, vocab=32000, qkv_bias=False)
    T, tokens = 4096, 32768
    assert step_flops(c, tokens, tokens // T * T * T) - step_flops(c, tokens, 0) == 6 * 16 * 5120 * T * tokens


@pytest.mark.parametrize("c", PRESETS.values(), ids=PRESETS)
def test_what_is_kept_is_not_computed_again(c):
    T = 4096
    assert recompute_flops(c, KEEPS, T) == 0 and keep_bytes(c, (), 2) == 0
    forward = (step_flops(c, T, T * T) - step_flops(c, T, 0)) / 3 / c.layers / T
    forward += 2 * (c.hidden * (c.qkv_width + c.attention_width) + 2 * c.hidden * c.ffn)
    # all of a layer's forward pass but the last matrix
    assert recompute_flops(c, (), T) == pytest.approx(forward, rel=1e-6)
    for name in KEEPS:
        assert recompute_flops(c, (name,), T) < recompute_flops(c, (), T)


@pytest.mark.parametrize(("change", "said"), [
    (dict(layers=0), "layers is 0"), (dict(vocab=-1), "vocab is -1"), (dict(hidden=100), "hidden 100 is not a multiple of 64"),
    (dict(ffn=50), "ffn 50 is not a multiple of 16"), (dict(head_dim=48), "head width 48"),
    (dict(heads=4, kv_heads=3), "4 heads do not share 3 kv heads")])
def test_a_shape_that_cannot_be_built_is_refused_by_field(change, said):
    with pytest.raises(UserError, match=f"model test: {said}"):
        dataclasses.replace(TINY, **change)


def test_a_misspelt_preset_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match="--model qwen2.5-7: no such model; did you mean qwen2.5-7b"):
        preset("qwen2.5-7")
    with pytest.raises(UserError, match="--model x: no such model .*120b"):
        preset("x")
