"""What the compiler makes of each kernel on a GPU that is not there.

    python -m tests.kernels.aot gemm                        one JSON line a kernel and specialization (TRITON_INTERPRET unset)
    python -m tests.kernels.aot gemm --target hip:gfx942    any of TARGETS; cuda:90, the H200's, is the default

tests/kernels/aot_<file>.py says what is compiled:
    cases(target)   calls the public ops of kernels/<file>.py on CPU tensors, as a training step would. Nothing runs, so a
                    weight address may be any multiple of 256, and small N is as good as large. On other targets than the
                    H200's one of each kernel will do
    EXPECT          {kernel: {fact: least count}} for the H200: facts are the keys of a printed line, such as "wgmma"

Triton's own launcher specializes the arguments and compiles, up to the point where it would load the binary: the driver
below says which GPU it is, and `warmup` stops there. Works on triton 3.6 and 3.9.
"""
import argparse
import contextlib
import importlib
import io
import json
import os
import re
from types import SimpleNamespace
from typing import NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels import launch
from kernels.launch import GPU


class Target(NamedTuple):
    """What Triton and the tile tables are told."""
    triton: GPUTarget
    gpu: GPU


H200 = "cuda:90"
TARGETS = {
    "cuda:80": Target(GPUTarget("cuda", 80, 32), GPU((8, 0), 108, 166912)),           # A100
    "cuda:89": Target(GPUTarget("cuda", 89, 32), GPU((8, 9), 128, 101376)),           # 4090
    H200: Target(GPUTarget("cuda", 90, 32), GPU((9, 0), 132, 232448)),
    "cuda:120": Target(GPUTarget("cuda", 120, 32), GPU((12, 0), 170, 101376)),        # 5090
    "hip:gfx942": Target(GPUTarget("hip", "gfx942", 64), GPU((0, 0), 304, 65536)),    # MI300X
}

PTX_FACTS = {
    "wgmma": r"wgmma\.mma_async",
    "mma_sync": r"mma\.sync",
    "tma_loads": r"cp\.async\.bulk\.tensor\S*\.shared\S*\.global",
    "tma_stores": r"cp\.async\.bulk\.tensor\S*\.global\S*\.shared",
    "async_copies": r"cp\.async\.c[ag]\.shared",
    "async_copies_16_bytes": r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10",
    "loads": r"ld\.global",
    "loads_16_bytes": r"ld\.global\S*\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16)",
    "stores": r"st\.global",
    "stores_16_bytes": r"st\.global\S*\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16)",
}
AMDGCN_FACTS = {
    "mfma": r"v_mfma_f32",
    "loads": r"(buffer|global|flat)_load_",
    "loads_16_bytes": r"(buffer|global|flat)_load_dwordx4",
    "stores": r"(buffer|global|flat)_store_",
    "stores_16_bytes": r"(buffer|global|flat)_store_dwordx4",
}


class Driver:
    """The part of Triton's driver interface that specializing and compiling ask for."""
    def __init__(self, target: Target):
        self.target = target
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": target.gpu.shared_bytes})

    def get_current_target(self) -> GPUTarget:
        return self.target.triton

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ptxas_report(log: str) -> dict:
    """Registers, spilled bytes and whether wgmma is serialized, from what ptxas said when Triton ran it."""
    return {"registers": int(re.search(r"Used (\d+) registers", log)[1]),
            "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
            "wgmma_serialized": "serializ" in log}


def amdgcn_report(text: str) -> dict:
    """The same from the metadata behind an assembled kernel; what spills goes to the private segment."""
    return {"registers": int(re.search(r"\.vgpr_count: +(\d+)", text)[1]),
            "spill_bytes": int(re.search(r"\.private_segment_fixed_size: +(\d+)", text)[1])}


def report(fn: JITFunction, kernel, constants: dict, log: str) -> dict:
    """The facts of one compiled kernel, ready to be printed."""
    ptx = "ptx" in kernel.asm
    text, facts = (kernel.asm["ptx"], PTX_FACTS) if ptx else (kernel.asm["amdgcn"], AMDGCN_FACTS)
    return {"kernel": fn.__name__, "constants": constants, "warps": kernel.metadata.num_warps,
            "stages": kernel.metadata.num_stages, "shared_bytes": kernel.metadata.shared,
            **(ptxas_report(log) if ptx else amdgcn_report(text)),
            **{fact: len(re.findall(pattern, text)) for fact, pattern in facts.items()}}


def compile_instead_of_launch(target: Target) -> None:
    """From here on `kernel[grid](...)` compiles for `target` and prints a line; each specialization once."""
    driver.set_active(Driver(target))
    launch.gpu = lambda device=0: target.gpu
    # Triton prints what ptxas says; a kernel out of its cache would say nothing
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    run, seen = JITFunction.run, set()

    def compile_once(self, *args, grid, warmup, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in seen:
            # Triton caches the kernel, so that its id stays its own
            seen.add(id(kernel))
            constants = {k: str(v) for k, v in kwargs.items() if k in self.arg_names}
            print(json.dumps(report(self, kernel, constants, log.getvalue())), flush=True)
        return kernel

    JITFunction.run = compile_once


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "TRITON_INTERPRET=1: nothing would be compiled"
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+")
    parser.add_argument("--target", choices=TARGETS, default=H200)
    options = parser.parse_args()
    compile_instead_of_launch(TARGETS[options.target])
    for file in options.files:
        importlib.import_module(f"tests.kernels.aot_{file}").cases(options.target)
