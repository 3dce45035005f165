"""AdamW on the host, in place over flat arrays: all arithmetic in fp32, each operation rounded once.

    join   bits = (hi << 16) + lo                       the fp32 master; hi, lo int16 (hi is a bf16's bits)
    split  hi = (bits + 0x8000) >> 16;  lo = bits - (hi << 16)
           hi is the nearest bf16, ties away from zero; lo is in [-32768, 32767]
    x = g factor                                        g bf16 or fp32; factor: the clip factor
    m = beta1 m + (1 - beta1) x
    v = beta2 v + (1 - beta2) (x x)
    w = decay w - rate (m / (sqrt(v) rbc2 + eps))
        decay = 1 - lr weight_decay,  rate = lr / (1 - beta1^t),  rbc2 = 1 / sqrt(1 - beta2^t)

Nothing is fused or reordered and no element depends on another, so the bits do not depend on threads or on how a range
is cut, and kernels/adamw.py gives the same ones. 26 bytes a parameter move (split master, bf16 gradient); everything
else hides behind them.

numpy knows no bf16: such arrays are int16, their bits. The loops run without the GIL and allocate 8 KiB; threads are the
caller's (runtime/optimizer.py): numba's own wait for the slowest of them at the end of each range.
Source: Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, with decay scaled by the learning rate.
"""
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numba
import numpy as np
from numba import njit
from numba.extending import overload

from runtime.machine import cpu_cores

# parameters that the innermost loops see at once: their fp32 copies stay in L1, and LLVM vectorizes each loop
BLOCK = 1024
# elements that one thread joins or splits at a time
PART = 1 << 20

# division by zero gives inf, as in numpy; the default raises and stops vectorization
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}


class AdamWStep(NamedTuple):
    """What an update needs besides arrays; every number computed in fp64 and rounded to fp32 once."""
    beta1: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    eps: np.float32
    decay: np.float32
    rate: np.float32
    rbc2: np.float32


def adamw_step(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, t: int) -> AdamWStep:
    """Numbers of update `t`; the first is 1 (ValueError below that)."""
    if t < 1:
        raise ValueError(f"t: {t}; the first update is 1")
    numbers = (beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - lr * weight_decay, lr / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t))
    return AdamWStep(*map(np.float32, numbers))


# pieces of a block: numba picks the function that fits the types, when it compiles

def _load_master(master, s, e, bits):
    """bits[: e - s] = elements s..e of `master`, (hi, lo) or (w,)."""


def _store_master(bits, master, s, e):
    """The inverse of `_load_master`."""


def _load_gradient(g, s, e, bits):
    """bits[: e - s] = elements s..e of `g`, bf16 bits or fp32."""


# an int32 loop: any constant not cast to int32 makes it int64, half as fast

@njit(cache=True, **_OPTIONS)
def _join(hi, lo, bits):
    for i in range(hi.size):
        bits[i] = np.int32((np.int32(hi[i]) << np.int32(16)) + np.int32(lo[i]))


@njit(cache=True, **_OPTIONS)
def _split(bits, hi, lo):
    for i in range(hi.size):
        z = bits[i]
        hi[i] = np.int16(np.int32(z + np.int32(0x8000)) >> np.int32(16))
        lo[i] = np.int16(z)


@njit(**_OPTIONS)
def _widen(g, bits):
    for i in range(g.size):
        bits[i] = np.int32(np.int32(g[i]) << np.int32(16))


@njit(**_OPTIONS)
def _copy(source, to):
    for i in range(source.size):
        to[i] = source[i]


@overload(_load_master, jit_options=_OPTIONS)
def _load_master_typed(master, s, e, bits):
    if len(master) == 2:
        return lambda master, s, e, bits: _join(master[0][s:e], master[1][s:e], bits)
    return lambda master, s, e, bits: _copy(master[0][s:e], bits.view(np.float32))


@overload(_store_master, jit_options=_OPTIONS)
def _store_master_typed(bits, master, s, e):
    if len(master) == 2:
        return lambda bits, master, s, e: _split(bits, master[0][s:e], master[1][s:e])
    return lambda bits, master, s, e: _copy(bits.view(np.float32)[: e - s], master[0][s:e])


@overload(_load_gradient, jit_options=_OPTIONS)
def _load_gradient_typed(g, s, e, bits):
    if g.dtype == numba.int16:
        return lambda g, s, e, bits: _widen(g[s:e], bits)
    return lambda g, s, e, bits: _copy(g[s:e], bits.view(np.float32))


@njit(**_OPTIONS)
def _adamw(w, x, m, v, factor, step):
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, rate, rbc2 = step
    for i in range(m.size):
        xi = x[i] * factor
        mi = beta1 * m[i] + one_minus_beta1 * xi
        vi = beta2 * v[i] + one_minus_beta2 * (xi * xi)
        m[i] = mi
        v[i] = vi
        w[i] = decay * w[i] - rate * (mi / (np.sqrt(vi) * rbc2 + eps))


@njit(cache=True, **_OPTIONS)
def _update(master, m, v, g, factor, step, begin, end):
    w_bits, x_bits = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    w, x = w_bits.view(np.float32), x_bits.view(np.float32)
    for s in range(begin, end, BLOCK):
        e = min(s + BLOCK, end)
        _load_master(master, s, e, w_bits)
        _load_gradient(g, s, e, x_bits)
        _adamw(w, x, m[s:e], v[s:e], factor, step)
        _store_master(w_bits, master, s, e)


def update(master: tuple[np.ndarray, ...], m: np.ndarray, v: np.ndarray, g: np.ndarray, factor: np.float32,
           step: AdamWStep, begin: int, end: int) -> None:
    """AdamW in place on elements begin..end of flat, contiguous arrays of one length; g may be longer.

    On the calling thread, without the GIL: whoever has more cores calls it from more threads, on other ranges.
    master: (hi, lo) int16, or (w,) fp32. m, v: fp32. g: bf16 bits (int16) or fp32. Raises ValueError for another dtype,
    a stride, or a range outside.
    """
    n = m.size
    kinds = [("hi", "int16"), ("lo", "int16")] if len(master) == 2 else [("w", "float32")]
    for (name, dtype), array in zip([*kinds, ("m", "float32"), ("v", "float32")], [*master, m, v], strict=True):
        if array.dtype != dtype or array.shape != (n,) or not array.flags.c_contiguous:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, strides {array.strides}; wanted {dtype} {(n,)}, contiguous")
    if g.dtype not in (np.int16, np.float32) or g.ndim != 1 or not g.flags.c_contiguous:
        raise ValueError(f"g: {g.dtype} {g.shape}, strides {g.strides}; wanted int16 (bf16 bits) or float32, flat, contiguous")
    if not 0 <= begin <= end <= min(n, g.size):
        raise ValueError(f"begin, end: {begin}, {end}; master has {n} elements, the gradient {g.size}")
    _update(master, m, v, g, np.float32(factor), step, begin, end)


def warm_up(split_master: bool, bf16_gradient: bool) -> None:
    """Compiles `update` for these arrays, or loads it from numba's cache: seconds that no training step should take."""
    master = (np.zeros(1, np.int16),) * 2 if split_master else (np.zeros(1, np.float32),)
    m, v = np.zeros((2, 1), np.float32)
    g = np.zeros(1, np.int16 if bf16_gradient else np.float32)
    update(master, m, v, g, np.float32(1), adamw_step(0, 0.9, 0.95, 1e-8, 0, 1), 0, 1)


def join(hi: np.ndarray, lo: np.ndarray, out: np.ndarray) -> None:
    """out [n] fp32 = the masters of hi, lo [n] int16. All flat and contiguous."""
    _check_halves(hi, lo, out)
    bits = out.view(np.int32)
    _on_all_cores(lambda part: _join(hi[part], lo[part], bits[part]), hi.size)


def split(values: np.ndarray, hi: np.ndarray, lo: np.ndarray) -> None:
    """hi, lo [n] int16 = the halves of values [n] fp32. All flat and contiguous."""
    _check_halves(hi, lo, values)
    bits = values.view(np.int32)
    _on_all_cores(lambda part: _split(bits[part], hi[part], lo[part]), hi.size)


def _on_all_cores(fn: Callable[[slice], None], n: int) -> None:
    """fn for slices of 0..n, on threads; it has to let go of the GIL."""
    with ThreadPoolExecutor(cpu_cores()) as pool:
        # list: raises what one of them raised
        list(pool.map(fn, (slice(begin, begin + PART) for begin in range(0, n, PART))))


def _check_halves(hi: np.ndarray, lo: np.ndarray, whole: np.ndarray) -> None:
    for name, array, dtype in (("hi", hi, np.int16), ("lo", lo, np.int16), ("whole", whole, np.float32)):
        if array.dtype != dtype or array.shape != (hi.size,) or not array.flags.c_contiguous:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, strides {array.strides}; "
                             f"wanted {np.dtype(dtype)} {(hi.size,)}, contiguous")
