"""Every kernel that ships compiles for each GPU: it fits shared memory, spills nothing, and uses the units it is meant to."""
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.aot import H200, TARGETS

HERE = Path(__file__).parent
FILES = sorted(path.stem.removeprefix("aot_") for path in HERE.glob("aot_*.py"))
# what a kernel that takes wgmma on the H200 takes on the others
MATRIX_UNITS = {
    "cuda:80": {"mma_sync": 1, "async_copies_16_bytes": 2},
    "cuda:89": {"mma_sync": 1, "async_copies_16_bytes": 2},
    "cuda:120": {"mma_sync": 1, "tma_loads": 2},
    "hip:gfx942": {"mfma": 1, "loads_16_bytes": 2},
}


def compiled(target: str, *files: str) -> list[dict]:
    """The facts of all kernels of `files`."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", "tests.kernels.aot", *files, "--target", target], cwd=HERE.parents[1], env=env,
                         capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def expected(file: str) -> dict[str, dict[str, int]]:
    return importlib.import_module(f"tests.kernels.aot_{file}").EXPECT


def check(kernel: dict, target: str, least: dict[str, int]) -> None:
    assert kernel["shared_bytes"] <= TARGETS[target].gpu.shared_bytes, kernel
    assert kernel["spill_bytes"] == 0, kernel
    for fact, count in least.items():
        assert kernel[fact] >= count, kernel


# one process a file, so that a compiler crash or hang names it
@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_for_the_h200_and_use_its_units(file):
    kernels, expect = compiled(H200, file), expected(file)
    assert set(expect) <= {k["kernel"] for k in kernels}, "EXPECT names a kernel that cases() does not launch"
    for k in kernels:
        least = expect.get(k["kernel"], {})
        check(k, H200, least)
        assert not k["wgmma_serialized"], k
        # a dot that asks for wgmma and falls back shows up as mma.sync
        assert k["mma_sync"] == 0 or "wgmma" not in least, k


@pytest.mark.parametrize("target", MATRIX_UNITS)
def test_kernels_compile_for_other_gpus(target):
    matrix_kernels = {name for file in FILES for name, least in expected(file).items() if "wgmma" in least}
    kernels = compiled(target, *FILES)
    # the H200 alone has the one in Gluon, and the others its two halves
    assert matrix_kernels - {"_linear_swiglu_fwd"} <= {k["kernel"] for k in kernels}
    for k in kernels:
        check(k, target, MATRIX_UNITS[target] if k["kernel"] in matrix_kernels else {})
