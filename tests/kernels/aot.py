"""What the compiler makes of each kernel on Hopper, with no GPU there.

    python -m tests.kernels.aot gemm        one JSON line a kernel and specialization (TRITON_INTERPRET unset)

tests/kernels/aot_<file>.py says what is compiled:
    cases()    calls the public ops of kernels/<file>.py on CPU tensors, as a training step would. Nothing runs, so a
               weight address may be any multiple of 256, and small N is as good as large
    EXPECT     optional, {kernel: {fact: least count}}: facts are the keys of a printed line, such as "wgmma"

Triton's own launcher specializes the arguments and compiles, up to the point where it would load the binary: the driver
below says that the GPU is a Hopper, and `warmup` stops there. Works on triton 3.6 and 3.9.
"""
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# shared memory that one block can have on sm_90
SHARED_LIMIT_BYTES = 232448

FACTS = {
    "wgmma": r"wgmma\.mma_async",
    "mma_sync": r"mma\.sync",
    "tma_loads": r"cp\.async\.bulk\.tensor\S*\.shared\S*\.global",
    "tma_stores": r"cp\.async\.bulk\.tensor\S*\.global\S*\.shared",
    "loads": r"ld\.global",
    "loads_16_bytes": r"ld\.global\S*\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16)",
    "stores": r"st\.global",
    "stores_16_bytes": r"st\.global\S*\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16)",
}


class Hopper:
    """The part of Triton's driver interface that specializing and compiling ask for."""
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_LIMIT_BYTES})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ptxas_report(ptx: str) -> dict:
    """Registers, spilled bytes and whether wgmma is serialized: ptxas -v on `ptx`, with the ptxas in Triton's wheel."""
    folder = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    arch = re.search(r"\.target (\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as scratch:
        source = os.path.join(scratch, "kernel.ptx")
        with open(source, "w") as f:
            f.write(ptx)
        # the older one refuses the newer PTX
        for tool in ("ptxas", "ptxas-blackwell"):
            run = subprocess.run([os.path.join(folder, tool), "-v", f"-arch={arch}", source, "-o", f"{source}.cubin"],
                                 capture_output=True, text=True)
            if run.returncode == 0:
                break
        else:
            raise RuntimeError(f"ptxas: {run.stderr}")
    text = run.stdout + run.stderr
    return {"registers": int(re.search(r"Used (\d+) registers", text)[1]),
            "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text))),
            "wgmma_serialized": "serializ" in text}


def report(fn: JITFunction, kernel, constants: dict) -> dict:
    """The facts of one compiled kernel, ready to be printed."""
    ptx = kernel.asm["ptx"]
    return {"kernel": fn.__name__, "constants": constants, "warps": kernel.metadata.num_warps,
            "stages": kernel.metadata.num_stages, "shared_bytes": kernel.metadata.shared,
            **ptxas_report(ptx), **{fact: len(re.findall(pattern, ptx)) for fact, pattern in FACTS.items()}}


def compile_instead_of_launch() -> None:
    """From here on `kernel[grid](...)` compiles for Hopper and prints a line; each specialization once."""
    driver.set_active(Hopper())
    launch, seen = JITFunction.run, set()

    def compile_once(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in seen:
            # Triton caches the kernel, so that its id stays its own
            seen.add(id(kernel))
            print(json.dumps(report(self, kernel, {k: str(v) for k, v in kwargs.items() if k in self.arg_names})), flush=True)
        return kernel

    JITFunction.run = compile_once


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "TRITON_INTERPRET=1: nothing would be compiled"
    compile_instead_of_launch()
    importlib.import_module(f"tests.kernels.aot_{sys.argv[1]}").cases()
