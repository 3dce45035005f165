"""No product on its way to a pointer is taken in int32 where it may pass 2^31: read from the kernels' source."""
import math
from pathlib import Path

import pytest

from kernels.gemm import bias_grad_partials_shape
from kernels.rmsnorm import MAX_D, rmsnorm_partials_shape
from kernels.rope import rope_partials_shape
from tests.kernels.narrow_products import narrow_products

KERNELS = sorted((Path(__file__).parents[2] / "kernels").glob("*.py"))
# fit int32, for a reason that the source does not show
BOUNDED = {
    # tiles of rows times heads: number the programs
    ("attention", "_dkv_blocks", "begin * G"), ("attention_hopper", "_fwd_consumer", "gl.cdiv(N, BLOCK) * H"),
    ("attention_hopper", "_dq_consumer", "gl.cdiv(N, BLOCK) * H"),
    # a slice of rows a program
    ("gemm", "_bias_grad_partial_bwd", "tl.program_id(1) * rows"),
    # sums of programs, as many as a GPU runs at once: see the test of their sizes
    ("gemm", "_bias_grad_partial_bwd", "tl.program_id(1) * N"), ("gemm", "_bias_grad_sum_bwd", "p * N"),
    ("rmsnorm", "_rmsnorm_bwd", "tl.program_id(0) * D"), ("rmsnorm", "_sum_partials", "p[:, None] * D"),
    ("rope", "_rope_norm_bwd", "tl.program_id(0) * Dh"),
}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_POS6_program_ids_and_strides_are_int64_before_they_are_multiplied(path):
    found = {(path.stem, *where): line for where, line in narrow_products(path.read_text()).items()}
    unsafe = [f"{path.name}:{line} {kernel}: {product}" for (_, kernel, product), line in found.items()
              if (path.stem, kernel, product) not in BOUNDED]
    assert not unsafe, f"int32 where 2^31 may be passed: {unsafe}"
    gone = {entry for entry in BOUNDED if entry[0] == path.stem} - set(found)
    assert not gone, f"no longer in the source: {gone}"


def test_POS6_sums_of_programs_fit_int32():
    for shape in (rmsnorm_partials_shape(MAX_D), rope_partials_shape(256), bias_grad_partials_shape(1 << 20)):
        assert math.prod(shape) < 1 << 31


BAD = {
    "a program id times a stride": "tl.load(x + tl.program_id(0) * stride)",
    "through names": """
    row = tl.program_id(0)
    at = row * stride
    p = x + at
    b = tl.load(p)""",
    "widened when it is too late": "tl.store(x + (tl.program_id(0) * D).to(tl.int64), 0.0)",
    "a whole buffer's tiles": """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(x + i, mask=i < n)""",
    "added to a pointer in place": """
    x += tl.program_id(0) * stride
    b = tl.load(x)""",
    "a loop's variable": """
    for row in tl.range(tl.program_id(0), n, tl.num_programs(0)):
        b = tl.load(x + row * D)""",
    "where a loop starts": """
    for i in range(tl.program_id(0) * D, n):
        b = tl.load(x + i)""",
    "what was loaded": "tl.load(x + tl.load(tokens) * D)",
    "a vector of rows": """
    rows = tl.program_id(0) + tl.arange(0, BR)
    b = tl.load(x + rows[:, None] * D + tl.arange(0, D)[None, :])""",
    "wide in one branch alone": """
    row = tl.program_id(0)
    if D > 64:
        row = row.to(tl.int64)
    b = tl.load(x + row * D)""",
    "cut back to 32 bits": "tl.load(x + tl.program_id(0).to(tl.int64).to(tl.int32) * D)",
    "a descriptor's base": "tl.make_tensor_descriptor(x + tl.program_id(0) * stride, [BR, D], [D, 1], [BR, D])",
}
GOOD = {
    "widened first": "tl.load(x + tl.program_id(0).to(tl.int64) * stride)",
    "cast first": "tl.load(x + tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK))",
    "the other factor is wide": "tl.load(x + tl.program_id(0) * D.to(tl.int64))",
    "a column": "tl.load(x + (tl.program_id(0) % D) * D + tl.arange(0, D))",
    "a descriptor's coordinates": "tl.make_tensor_descriptor(x, [n, D], [D, 1], [BR, D]).load([tl.program_id(0) * BR, 0])",
}
HEADER = "@triton.jit\ndef kernel(x, tokens, n, stride, D: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr):\n    "


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_POS6_a_kernel_that_multiplies_in_int32_is_found(body):
    assert narrow_products(HEADER + body.strip())


@pytest.mark.parametrize("body", GOOD.values(), ids=GOOD)
def test_POS6_a_kernel_that_widens_before_it_multiplies_is_not_blamed(body):
    assert not narrow_products(HEADER + body.strip())


def test_POS6_rows_made_of_tiles_fit_int32_where_n_counts_no_elements():
    rows = "tl.load(x + tl.program_id(0) * BR + tl.arange(0, BR))"
    assert narrow_products(HEADER + rows) and not narrow_products(HEADER.replace(" n,", " N,") + rows)
