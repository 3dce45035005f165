"""What every kernel file needs to launch: is this the interpreter, what does this GPU have, scratch for descriptors.

Kernels take weights as raw integer addresses. `int_to_ptr` forgets alignment, so inside a kernel the hint goes on the
pointer after the cast (`tl.multiple_of(addr.to(tl.pointer_type(...)), 16)`), and `check_address` refuses, before the
launch, an address that would make the hint a lie.
"""
import functools
import math
import os
from typing import NamedTuple

import torch
import triton

# the interpreter is chosen by the environment before triton is imported; `triton.jit` looks once
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# triton 3.10 turns fused multiply-add off by default: say which one the kernels were measured with
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# of activations and weights
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# bytes that a descriptor or a 16-byte load needs its base and row stride to be a multiple of
ALIGNMENT_BYTES = 16


class GPU(NamedTuple):
    """What tiles and grids are chosen by. capability: CUDA's, (9, 0) for Hopper; (0, 0) on AMD, which has none.
    shared_bytes: what one program can have."""
    capability: tuple[int, int]
    sms: int
    shared_bytes: int


def _descriptor_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


triton.set_allocator(_descriptor_scratch)


@functools.cache
def gpu(device: int = 0) -> GPU:
    """The GPU; where there is none, a Hopper, for which kernels are compiled ahead of time (for others tests replace this)."""
    if not torch.cuda.is_available():
        return GPU((9, 0), 132, 232448)
    properties = torch.cuda.get_device_properties(device)
    sms = properties.multi_processor_count
    # torch calls an MI300X 9.4
    if torch.version.hip:
        return GPU((0, 0), sms, properties.shared_memory_per_block)
    return GPU((properties.major, properties.minor), sms, properties.shared_memory_per_block_optin)


def num_sms(device: int = 0) -> int:
    """Multiprocessors of the GPU; a persistent kernel launches that many programs."""
    return gpu(device).sms


def capability(device: int = 0) -> tuple[int, int]:
    """CUDA compute capability, (9, 0) for Hopper and (0, 0) on AMD."""
    return gpu(device).capability


def tile_class(device: int = 0) -> str:
    """The GPU whose tiles this one takes: those with the same shared memory (KB a block) and matrix unit."""
    major, minor = capability(device)
    if major in (9, 10):
        return "sm_90"      # 227
    if (major, minor) in ((8, 0), (8, 7)):
        return "sm_80"      # 163
    if major >= 12:
        return "sm_120"     # 99, and TMA
    return "sm_89" if major else "gfx942"       # 99; 64


def check_address(name: str, address: int) -> None:
    """Raises ValueError, naming the tensor, unless `address` is a multiple of 16 bytes."""
    if address % ALIGNMENT_BYTES:
        raise ValueError(f"{name}: address {address:#x} is not a multiple of {ALIGNMENT_BYTES} bytes; "
                         "bind it through model.layout.Layout, whose offsets are")


def check_rows(name: str, x: torch.Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], *shape: int) -> None:
    """Raises ValueError, naming the tensor, unless `x` is contiguous and has `shape` and that dtype, or one of those."""
    if x.dtype not in (dtypes if isinstance(dtypes, tuple) else (dtypes,)):
        raise ValueError(f"{name}: {x.dtype}; wanted {dtypes}")
    if tuple(x.shape) != shape or not x.is_contiguous():
        raise ValueError(f"{name}: shape {tuple(x.shape)}, strides {x.stride()}; wanted {shape}, contiguous")


def check_partials(partials: torch.Tensor, *shape: int) -> None:
    """Raises ValueError unless `partials` is contiguous fp32 and holds at least `shape`."""
    if partials.dtype != torch.float32 or not partials.is_contiguous() or partials.numel() < math.prod(shape):
        raise ValueError(f"partials: {partials.dtype} {tuple(partials.shape)}, strides {partials.stride()}; "
                         f"wanted at least {shape} of fp32, contiguous")
