"""Every kernel that ships compiles for Hopper: it fits shared memory, spills nothing, and uses the units it is meant to."""
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.aot import SHARED_LIMIT_BYTES

HERE = Path(__file__).parent
FILES = sorted(path.stem.removeprefix("aot_") for path in HERE.glob("aot_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_for_hopper_without_spills(file):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # one process a file, so that a compiler crash or hang names it
    run = subprocess.run([sys.executable, "-m", "tests.kernels.aot", file], cwd=HERE.parents[1], env=env, capture_output=True,
                         text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert kernels, "cases() launched nothing"
    expect = getattr(importlib.import_module(f"tests.kernels.aot_{file}"), "EXPECT", {})
    assert set(expect) <= {k["kernel"] for k in kernels}, "EXPECT names a kernel that cases() does not launch"
    for k in kernels:
        assert k["shared_bytes"] <= SHARED_LIMIT_BYTES, k
        assert k["spill_bytes"] == 0, k
        assert not k["wgmma_serialized"], k
        # a dot that asks for wgmma and falls back shows up as mma.sync
        if "wgmma" in expect.get(k["kernel"], {}):
            assert k["mma_sync"] == 0, k
        for fact, least in expect.get(k["kernel"], {}).items():
            assert k[fact] >= least, k
