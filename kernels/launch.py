"""What every kernel file needs to launch: is this the interpreter, which tiles fit this GPU, scratch for descriptors.

Kernels take weights as raw integer addresses. `int_to_ptr` forgets alignment, so inside a kernel the hint goes on the
pointer after the cast (`tl.multiple_of(addr.to(tl.pointer_type(...)), 16)`), and `check_address` refuses, before the
launch, an address that would make the hint a lie.
"""
import functools
import math
import os

import torch
import triton

# the interpreter is chosen by the environment before triton is imported; `triton.jit` looks once
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# triton 3.10 turns fused multiply-add off by default: say which one the kernels were measured with
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# bytes that a descriptor or a 16-byte load needs its base and row stride to be a multiple of
ALIGNMENT_BYTES = 16

# kernels are compiled for these when no GPU is there to ask (ahead-of-time tests)
ASSUMED_CAPABILITY = (9, 0)
ASSUMED_SMS = 132


def _descriptor_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


triton.set_allocator(_descriptor_scratch)


@functools.cache
def num_sms(device: int = 0) -> int:
    """Multiprocessors of the GPU; a persistent kernel launches that many programs."""
    if not torch.cuda.is_available():
        return ASSUMED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: int = 0) -> tuple[int, int]:
    """CUDA compute capability, (9, 0) for Hopper; tile tables are keyed by it."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else ASSUMED_CAPABILITY


def check_address(name: str, address: int) -> None:
    """Raises ValueError, naming the tensor, unless `address` is a multiple of 16 bytes."""
    if address % ALIGNMENT_BYTES:
        raise ValueError(f"{name}: address {address:#x} is not a multiple of {ALIGNMENT_BYTES} bytes; "
                         "bind it through model.layout.Layout, whose offsets are")


def check_rows(name: str, x: torch.Tensor, *shape: int) -> None:
    """Raises ValueError, naming the tensor, unless `x` is contiguous and has `shape`."""
    if tuple(x.shape) != shape or not x.is_contiguous():
        raise ValueError(f"{name}: shape {tuple(x.shape)}, strides {x.stride()}; wanted {shape}, contiguous")


def check_partials(partials: torch.Tensor, *shape: int) -> None:
    """Raises ValueError unless `partials` is contiguous fp32 and holds at least `shape`."""
    if partials.dtype != torch.float32 or not partials.is_contiguous() or partials.numel() < math.prod(shape):
        raise ValueError(f"partials: {partials.dtype} {tuple(partials.shape)}, strides {partials.stride()}; "
                         f"wanted at least {shape} of fp32, contiguous")
