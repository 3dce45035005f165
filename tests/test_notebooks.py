"""Every notebook runs from its first cell to its last, each in a fresh process, and is committed without outputs."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    source = "\n".join("".join(cell["source"]) for cell in code_cells(path))
    run = subprocess.run([sys.executable, "-c", source], cwd=path.parent, env=os.environ | {"MPLBACKEND": "Agg"}, capture_output=True,
                         text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_committed_and_no_kernel_is_pasted(path):
    for cell in code_cells(path):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        assert "@triton.jit" not in "".join(cell["source"])
