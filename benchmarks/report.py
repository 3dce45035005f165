"""What every benchmark prints and writes: the machine, the versions, the command, and a last line of JSON."""
import json
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """GPU, driver, versions and commit of this run."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "triton": _version("triton"), "numba": _version("numba"),
             # None outside a checkout
             "commit": _git("rev-parse", "--short", "HEAD") or None, "dirty": bool(_git("status", "--porcelain"))}
    if torch.cuda.is_available():
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": driver.stdout.strip()}
    return facts


def command() -> str:
    """The command line as it can be typed again."""
    module = Path(sys.argv[0]).stem
    return " ".join(["python -m", f"benchmarks.{module}", *sys.argv[1:]])


def peaks() -> dict[str, float]:
    """GiB: most HBM so far as torch allocated it, most host memory as the kernel saw it; huge pages of it now."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20
    hbm = torch.cuda.max_memory_allocated() / 2 ** 30 if torch.cuda.is_available() else 0.0
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.exists() else []
    huge = sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
    return {"hbm_peak_gib": round(hbm, 2), "host_peak_gib": round(host, 2), "huge_pages_gib": round(huge / 2 ** 20, 2)}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def finish(name: str, result: dict[str, Any], folder: Path | None = None) -> None:
    """Writes NAME_GPU_COMMIT.json to `folder` (benchmarks/results/) and prints the same object as the last line."""
    facts = machine()
    result = {"benchmark": name, "command": command(), "machine": facts} | result
    where = (facts.get("gpu") or platform.machine()).lower().replace(" ", "-")
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_{where}_{facts['commit']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _version(package: str) -> str | None:
    try:
        return __import__(package).__version__
    except ImportError:
        return None


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip()
