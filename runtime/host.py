"""Host memory: one mapping a purpose, of exact size, first touched in parallel, then pinned in pieces.

    extents   |    0    |    1    |                  2                  |
    pieces    |         0         |        1        |        2        |3|      2 is larger than a piece

Extents begin on pages of their own. A piece ends where an extent ends, or at a page inside an extent that is larger than
a piece: no page belongs to two pieces. The driver refuses a copy that crosses from one piece into the next, so whoever
copies asks `pieces` for the parts.

What is pinned is noted before the driver is asked and struck off after it let go, so that an exception or Ctrl-C at any
place leaves nothing behind: a failed `allocate` takes back its own pieces, `close` takes back all, the interpreter's end
closes what was left open. A mapping is unmapped after its pieces are struck off and its last tensor is gone: a tensor
may outlive `close`, but is pageable then.

Pinning that fails is an error. Pageable memory would train too, at a rate that no plan has predicted.
"""
import bisect
import contextlib
import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from model.errors import UserError
from runtime.machine import cgroup_memory, cpu_cores, format_bytes, memlock_bytes

PAGE_BYTES = mmap.PAGESIZE
# the driver refuses 512 GiB and more in one call, however much memory is free
PIN_PIECE_BYTES = 4 << 30
# touched by one thread at a time: many more slices than cores, and progress every tenth of a second
TOUCH_BYTES = 256 << 20


class PinError(Exception):
    """A pinner that refuses; the message is its reason. Nothing was registered."""


class Pinner(Protocol):
    """What makes memory fit for asynchronous copies."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pins whole pages. PinError if they cannot be pinned; the next call of the device then succeeds."""

    def unregister(self, address: int) -> None:
        """Lets go of what was registered at `address`, once no copy uses it. Never raises, whatever `address` is."""


class NoPinner:
    """For a machine without a GPU: nothing copies asynchronously there."""

    def register(self, address: int, num_bytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass


class CudaPinner:
    """Registers with the driver, for the current GPU.

    The runtime's cudaHostRegister leaves its error behind, and the next innocent call of the thread reports it; torch
    has no cudaGetLastError to consume it with. The driver's call only returns its status.
    """

    def __init__(self):
        self._driver = ctypes.CDLL("libcuda.so.1")
        # _v2 is the one with 64-bit sizes; cuda.h renames it
        self._driver.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._driver.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
        self._driver.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def register(self, address: int, num_bytes: int) -> None:
        # gives this thread torch's context, which the driver does not choose by itself
        torch.cuda.synchronize()
        status = self._driver.cuMemHostRegister_v2(address, num_bytes, 0)
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(name))
            raise PinError((name.value or b"unknown error").decode() + f", {status}")

    def unregister(self, address: int) -> None:
        # after a fault on the device nothing can be waited for, nor copied any more
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        self._driver.cuMemHostUnregister(address)


def round_to_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def piece_bounds(extents: Sequence[int], piece_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) of each piece over consecutive extents of whole pages; at most piece_bytes each."""
    bounds, begin, end = [], 0, 0
    for size in extents:
        if begin < end and end - begin + size > piece_bytes:
            bounds.append((begin, end))
            begin = end
        end += size
        while end - begin > piece_bytes:
            bounds.append((begin, begin + piece_bytes))
            begin += piece_bytes
    return [*bounds, (begin, end)]


class HostMemory:
    """Hands out pinned memory and takes it back. table: bytes by purpose, in whole pages."""

    def __init__(self, pinner: Pinner, *, piece_bytes: int = PIN_PIECE_BYTES,
                 progress: Callable[[int], None] = lambda touched_bytes: None):
        """piece_bytes: the most that one call registers, whole pages. progress: called while memory is taken, with the
        bytes touched so far, all purposes together."""
        if piece_bytes < PAGE_BYTES or piece_bytes % PAGE_BYTES:
            raise ValueError(f"piece_bytes {piece_bytes}: not a multiple of the page size {PAGE_BYTES}")
        self.piece_bytes, self.progress = piece_bytes, progress
        self.table: dict[str, int] = {}
        self._pinner = pinner
        # address -> piece, oldest first; a piece keeps its mapping
        self._pinned: dict[int, torch.Tensor] = {}
        # addresses where pieces end, sorted
        self._ends: list[int] = []
        self._touched_bytes = 0
        self._owner = os.getpid()
        self._at_exit = weakref.finalize(self, _unpin, pinner, self._pinned, self._owner)

    def allocate(self, purpose: str, extents: Sequence[int]) -> list[torch.Tensor]:
        """One zeroed uint8 tensor an extent, of exactly that many bytes, beginning on a page; all of it pinned.

        Raises UserError if the memory cannot be had or pinned, and leaves nothing of this call behind.
        """
        if not extents or min(extents) < 1:
            raise ValueError(f"{purpose}: extents {list(extents)}, each needs at least one byte")
        if not self._at_exit.alive:
            raise ValueError(f"{purpose}: asked for after close")
        sizes = [round_to_pages(size) for size in extents]
        total, num_before, bytes_before = sum(sizes), len(self._pinned), self.pinned_bytes
        try:
            # the tensor keeps the mapping; closing a mapping by hand would pull it away under its tensors
            memory = torch.frombuffer(_map(total), dtype=torch.uint8)
            self._touch(memory)
            self._pin(memory, piece_bounds(sizes, self.piece_bytes))
        except BaseException as error:
            pinned_bytes = self.pinned_bytes
            _unpin(self._pinner, self._pinned, self._owner, keep=num_before)
            if not isinstance(error, PinError):
                raise
            reason = str(error)
        else:
            self._ends = sorted(address + piece.numel() for address, piece in self._pinned.items())
            self.table[purpose] = self.table.get(purpose, 0) + total
            begins = itertools.accumulate(sizes, initial=0)
            return [memory[begin:begin + size] for begin, size in zip(begins, extents, strict=False)]
        # not in the except clause, whose traceback would keep the mapping alive
        memory = None
        raise UserError(_refusal(purpose, pinned_bytes, total - (pinned_bytes - bytes_before), reason))

    def pieces(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """(part, its first byte in `tensor`) for each piece that `tensor` (uint8, from allocate, or a slice) lies in."""
        address, size = tensor.data_ptr(), tensor.numel()
        inside = self._ends[bisect.bisect_right(self._ends, address):bisect.bisect_left(self._ends, address + size)]
        borders = [0, *(end - address for end in inside), size]
        return [(tensor[begin:end], begin) for begin, end in itertools.pairwise(borders)]

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the pinner holds now, all purposes together."""
        return sum(piece.numel() for piece in self._pinned.values())

    def close(self) -> None:
        """Unregisters everything, once the device has done its copies. May be called again, and after an interruption."""
        _unpin(self._pinner, self._pinned, self._owner)
        self.table, self._ends = {}, []
        self._at_exit.detach()

    def __enter__(self) -> "HostMemory":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _touch(self, memory: torch.Tensor) -> None:
        """Writes to every page: the kernel makes them here, on many cores, and not in the driver's call, on one."""
        pages = memory.numpy()

        def touch(begin: int) -> int:
            slice_ = pages[begin:begin + TOUCH_BYTES]
            slice_[::PAGE_BYTES] = 0
            return len(slice_)

        with ThreadPoolExecutor(cpu_cores()) as pool:
            for size in pool.map(touch, range(0, len(pages), TOUCH_BYTES)):
                self._touched_bytes += size
                self.progress(self._touched_bytes)

    def _pin(self, memory: torch.Tensor, bounds: list[tuple[int, int]]) -> None:
        for begin, end in bounds:
            piece = memory[begin:end]
            self._pinned[piece.data_ptr()] = piece
            try:
                self._pinner.register(piece.data_ptr(), piece.numel())
            except PinError:
                del self._pinned[piece.data_ptr()]
                raise


def _map(num_bytes: int) -> mmap.mmap:
    """Private memory: shared memory gets no huge pages by default. PinError if there is no room for it."""
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise PinError(f"mmap: {error.strerror}") from error
    # a child would share the pages, and whoever writes one first moves it away from where the device copies
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # macOS has neither, and a kernel may be built without the first
        with contextlib.suppress(OSError, AttributeError):
            mapping.madvise(getattr(mmap, advice))
    return mapping


def _unpin(pinner: Pinner, pinned: dict[int, torch.Tensor], owner: int, keep: int = 0) -> None:
    """Unregisters the newest first until `keep` are left; does nothing in a forked child, whose pages they are not."""
    while len(pinned) > keep and os.getpid() == owner:
        address = next(reversed(pinned))
        pinner.unregister(address)
        del pinned[address]


def _refusal(purpose: str, pinned_bytes: int, wanted_bytes: int, reason: str) -> str:
    memlock, cgroup = memlock_bytes(), cgroup_memory()
    limits = "RLIMIT_MEMLOCK (ulimit -l) " + ("unlimited" if memlock is None else format_bytes(memlock))
    limits += ", cgroup " + ("unlimited" if cgroup is None else f"{format_bytes(cgroup.usable_bytes)} of "
                             f"{format_bytes(cgroup.limit_bytes)} left")
    return (f"host memory for {purpose}: {format_bytes(pinned_bytes)} pinned so far, {format_bytes(wanted_bytes)} still wanted "
            f"and refused ({reason}); {limits}; raise the limit in the way (ulimit -l unlimited; docker run --ulimit memlock=-1 "
            f"--memory SIZE), end what else has pinned memory, or train a smaller --model")
