"""Host memory: what is registered, in which pieces, and that all of it is let go again."""
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.errors import UserError
from runtime import host
from runtime.host import PAGE_BYTES, CudaPinner, HostMemory, NoPinner, PinError, piece_bounds, round_to_pages

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def rss_bytes() -> int:
    """Exact: the kernel walks the page tables for it."""
    return int(re.search(r"^Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)[1]) * KiB


class CountingPinner:
    """Stands for the driver: refuses pages twice, single calls of call_limit bytes, more than total_limit bytes in all."""

    def __init__(self, call_limit: int = 1 << 62, total_limit: int = 1 << 62):
        self.call_limit, self.total_limit = call_limit, total_limit
        self.live: dict[int, int] = {}
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.unmapped_too_early = []

    def register(self, address, num_bytes):
        assert address % PAGE_BYTES == 0 and num_bytes % PAGE_BYTES == 0, "not whole pages"
        if any(address < begin + size and begin < address + num_bytes for begin, size in self.live.items()):
            raise PinError("already registered")
        if num_bytes >= self.call_limit or sum(self.live.values()) + num_bytes > self.total_limit:
            raise PinError("out of memory")
        self.live[address] = num_bytes
        self.registered.append((address, num_bytes))

    def unregister(self, address):
        self.unregistered.append(address)
        self.live.pop(address, None)
        if not is_mapped(address):
            self.unmapped_too_early.append(address)

    def assert_balanced(self):
        assert not self.live
        assert sorted(self.unregistered) == sorted(address for address, _ in self.registered), "not once each"
        assert not self.unmapped_too_early


class FailingAt(CountingPinner):
    """Raises `error` at its n-th call, before the pages are registered or after."""

    def __init__(self, nth: int, error: type[BaseException], after: bool = False):
        super().__init__()
        self.left, self.error, self.after = nth, error, after

    def register(self, address, num_bytes):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise self.error("refused")
        super().register(address, num_bytes)
        if self.left == 0:
            raise self.error("refused")


@pytest.mark.parametrize("extents", [
    [1], [PAGE_BYTES], [PAGE_BYTES + 1, 5, 3 * PAGE_BYTES - 1],
    # 129.5 MiB, which a power of two would make 256
    [259 * MiB // 2],
    # 33 MiB, which a power of two would make 64
    [7 * MiB + 3, 9 * MiB, 12 * MiB - 5, 5 * MiB + 2]], ids=len)
def test_MEM1_exact_size(extents):
    pinner = CountingPinner()
    with HostMemory(pinner) as memory:
        tensors = memory.allocate("masters", extents)
        planned = sum(round_to_pages(size) for size in extents)
        assert sum(size for _, size in pinner.registered) == planned == memory.pinned_bytes == memory.table["masters"]
        assert planned - sum(extents) < len(extents) * PAGE_BYTES
        assert [t.numel() for t in tensors] == extents
        assert all(t.dtype == torch.uint8 and t.data_ptr() % PAGE_BYTES == 0 and not t.any() for t in tensors)
    pinner.assert_balanced()


def test_MEM1_resident_memory_is_the_plan():
    with HostMemory(NoPinner()) as memory:
        # the threads that touch pages have stacks of their own
        memory.allocate("warm", [MiB])
        before = rss_bytes()
        tensors = memory.allocate("masters", [11 * MiB] * 3)
        grown = rss_bytes() - before
        assert abs(grown - 33 * MiB) <= 0.02 * 33 * MiB
        assert not any(t.any() for t in tensors)


def test_each_tensor_owns_its_bytes():
    with HostMemory(NoPinner(), piece_bytes=PAGE_BYTES) as memory:
        tensors = memory.allocate("slabs", [5, 3 * PAGE_BYTES + 1, PAGE_BYTES]) + memory.allocate("batch", [7])
        for value, tensor in enumerate(tensors, 1):
            tensor.fill_(value)
        assert all((tensor == value).all() for value, tensor in enumerate(tensors, 1))
        assert memory.table == {"slabs": 6 * PAGE_BYTES, "batch": PAGE_BYTES}
        memory.allocate("batch", [7])
        assert memory.table["batch"] == 2 * PAGE_BYTES


@pytest.mark.parametrize("extents", [[10 * MiB], [MiB, 5 * MiB // 2, 5 * MiB, 3 * MiB // 2], [MiB // 4] * 40,
                                     [3 * MiB + 7, 7 * MiB - 7 - PAGE_BYTES]], ids=len)
def test_MEM2_large_regions(extents):
    pinner = CountingPinner(call_limit=4 * MiB)
    with HostMemory(pinner, piece_bytes=4 * MiB - PAGE_BYTES) as memory:
        tensors = memory.allocate("masters", extents)
        ends = sorted((address, address + size) for address, size in pinner.registered)
        assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False)), "pieces share a page"
        assert sum(pinner.live.values()) == sum(round_to_pages(size) for size in extents)
        # whole tensors, and copies of a part that begins and ends anywhere
        for planned in [*tensors, *(t[5:-3] for t in tensors)]:
            planned.copy_(torch.arange(planned.numel()) % 251)
            parts = memory.pieces(planned)
            for part, _ in parts:
                begin, end = part.data_ptr(), part.data_ptr() + part.numel()
                assert any(first <= begin and end <= last for first, last in ends), "a copy crosses a piece's border"
            assert torch.equal(torch.cat([part for part, _ in parts]), planned)
            assert [begin for _, begin in parts] == [part.data_ptr() - planned.data_ptr() for part, _ in parts]
        assert all(len(memory.pieces(t)) == 1 for t in tensors if t.numel() < 4 * MiB - PAGE_BYTES)
    pinner.assert_balanced()


def test_MEM2_one_call_stays_below_what_the_driver_refuses():
    """`120b` on 1.5 TB: 512 GiB in one call are refused, however much is free."""
    bounds = piece_bounds([round_to_pages(1_400_000_000_000)], host.PIN_PIECE_BYTES)
    assert max(end - begin for begin, end in bounds) < 512 * GiB
    assert bounds[0][0] == 0 and bounds[-1][1] == round_to_pages(1_400_000_000_000)
    assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))


def test_MEM3_failed_register_leaves_nothing():
    pinner = FailingAt(4, PinError)
    before = rss_bytes()
    memory = HostMemory(pinner, piece_bytes=4 * MiB)
    kept = memory.allocate("batch", [100])[0]
    # piece 3 of 5
    with pytest.raises(UserError) as caught:
        memory.allocate("masters", [20 * MiB])
    assert len(pinner.registered) == 3 and pinner.unregistered == [address for address, _ in pinner.registered[:0:-1]]
    assert list(pinner.live) == [kept.data_ptr()], "what an earlier call pinned stays"
    assert memory.pinned_bytes == PAGE_BYTES and memory.table == {"batch": PAGE_BYTES}
    assert rss_bytes() - before < 4 * MiB, "still mapped"
    assert "masters: 8.0 MiB pinned so far, 12.0 MiB still wanted" in str(caught.value)
    # the object goes on
    assert memory.allocate("masters", [MiB])[0].numel() == MiB
    memory.close()
    pinner.assert_balanced()


@pytest.mark.gpu
def test_MEM3_next_cuda_call_after_a_failed_register_succeeds():
    pinner = CudaPinner()
    memory = HostMemory(pinner)
    tensor = memory.allocate("masters", [MiB])[0]
    # not mapped; zero bytes; pinned already
    for address, size in [(PAGE_BYTES, MiB), (tensor.data_ptr(), 0), (tensor.data_ptr(), MiB)]:
        with pytest.raises(PinError, match="CUDA_ERROR"):
            pinner.register(address, size)
        assert (torch.ones(1000, device="cuda") * 2).sum().item() == 2000
    # letting go of what is not there is no error of the next call either
    pinner.unregister(PAGE_BYTES)
    assert (torch.ones(1000, device="cuda") * 2).sum().item() == 2000
    memory.close()


@pytest.mark.gpu
def test_MEM3_an_invalid_range_becomes_one_line():
    class Elsewhere(CudaPinner):
        def register(self, address, num_bytes):
            super().register(PAGE_BYTES, num_bytes)

    line = r"0 B pinned so far, 1.0 MiB still wanted and refused \(CUDA_ERROR"
    with HostMemory(Elsewhere()) as memory, pytest.raises(UserError, match=line):
        memory.allocate("masters", [MiB])
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_MEM4_unregistered_before_unmapped():
    """Normal end, exception, the object forgotten, and a second run in the same process, with the same driver."""
    pinner = CountingPinner()
    with HostMemory(pinner, piece_bytes=MiB) as memory:
        # tensors forgotten early do not unmap what is pinned
        memory.allocate("masters", [3 * MiB])
    pinner.assert_balanced()
    with pytest.raises(RuntimeError), HostMemory(pinner, piece_bytes=MiB) as memory:
        memory.allocate("masters", [3 * MiB])
        raise RuntimeError("in training")
    pinner.assert_balanced()
    memory = HostMemory(pinner, piece_bytes=MiB)
    tensor = memory.allocate("masters", [3 * MiB])[0]
    del memory
    pinner.assert_balanced()
    # unregistered, and still there for who holds it
    assert not tensor.any()
    memory = HostMemory(pinner, piece_bytes=MiB)
    memory.allocate("masters", [3 * MiB])
    memory.close()
    memory.close()
    pinner.assert_balanced()
    assert len(pinner.registered) == 12
    with pytest.raises(ValueError, match="after close"):
        memory.allocate("masters", [1])


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_MEM4_interrupted_while_pinning(nth, after, error):
    """Ctrl-C arrives in the middle of a call that takes long, mostly: then the pages are registered, unknown to its caller."""
    pinner = FailingAt(nth, error, after)
    memory = HostMemory(pinner, piece_bytes=MiB)
    with pytest.raises(error):
        memory.allocate("masters", [3 * MiB])
    assert not pinner.live and memory.pinned_bytes == 0 and not pinner.unmapped_too_early
    assert {address for address, _ in pinner.registered} <= set(pinner.unregistered)
    memory.close()


def test_MEM4_interrupted_while_touching(monkeypatch):
    monkeypatch.setattr(host, "TOUCH_BYTES", MiB)

    def ctrl_c(touched_bytes):
        if touched_bytes == 2 * MiB:
            raise KeyboardInterrupt
    pinner = CountingPinner()
    with HostMemory(pinner, progress=ctrl_c) as memory, pytest.raises(KeyboardInterrupt):
        memory.allocate("masters", [8 * MiB])
    assert not pinner.registered and not pinner.unregistered


def test_MEM4_interrupted_while_closing():
    class SlowToLetGo(CountingPinner):
        interrupts = 1

        def unregister(self, address):
            super().unregister(address)
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
    pinner = SlowToLetGo()
    memory = HostMemory(pinner, piece_bytes=MiB)
    memory.allocate("masters", [3 * MiB])
    with pytest.raises(KeyboardInterrupt):
        memory.close()
    memory.close()
    assert not pinner.live and not pinner.unmapped_too_early


ENDINGS = """
import os, signal
from runtime.host import HostMemory

class Printing:
    def register(self, address, num_bytes): print(ending, "+", address, flush=True)
    def unregister(self, address): print(ending, "-", address, flush=True)

for ending in ("normal", "exception", "ctrl-c"):
    if (run := os.fork()) == 0:
        memory = HostMemory(Printing(), piece_bytes=1 << 20)
        tensors = memory.allocate("masters", [3 << 20])
        if ending == "normal" and os.fork():
            # the child has the object, but not the pages
            os.wait()
        if ending == "exception":
            raise RuntimeError("in training")
        if ending == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        break
    os.waitpid(run, 0)
"""


def test_MEM4_end_of_process_without_close():
    done = subprocess.run([sys.executable, "-c", ENDINGS], capture_output=True, text=True, timeout=120)
    calls = [line.split() for line in done.stdout.splitlines()]
    for ending in ("normal", "exception", "ctrl-c"):
        registered, unregistered = ([a for name, sign, a in calls if (name, sign) == (ending, kind)] for kind in "+-")
        assert len(registered) == 3 and unregistered == registered[::-1], f"{ending}: {done.stderr}"


def test_MEM5_pinned_memory_runs_out(monkeypatch):
    # nothing is written: 2.5 GiB of addresses, no memory
    monkeypatch.setattr(HostMemory, "_touch", lambda self, memory: None)
    monkeypatch.setattr(host, "memlock_bytes", lambda: 8 * MiB)
    pinner = CountingPinner(total_limit=GiB)
    with HostMemory(pinner, piece_bytes=GiB // 4) as memory:
        memory.allocate("masters", [GiB // 2])
        with pytest.raises(UserError) as caught:
            memory.allocate("moments", [GiB, GiB])
        assert memory.pinned_bytes == GiB // 2
    line = str(caught.value)
    assert "\n" not in line
    assert "host memory for moments: 1.0 GiB pinned so far, 1.5 GiB still wanted and refused (out of memory)" in line
    assert "RLIMIT_MEMLOCK (ulimit -l) 8.0 MiB, cgroup " in line
    assert "ulimit -l unlimited" in line and "--ulimit memlock=-1" in line and "--model" in line
    pinner.assert_balanced()


def test_MEM5_no_room_for_the_mapping():
    with HostMemory(NoPinner()) as memory, pytest.raises(UserError, match="0 B pinned so far, 64.0 PiB still wanted .*mmap: "):
        memory.allocate("masters", [1 << 56])


def test_progress_counts_every_byte(monkeypatch):
    monkeypatch.setattr(host, "TOUCH_BYTES", MiB)
    done = []
    with HostMemory(NoPinner(), progress=done.append) as memory:
        memory.allocate("masters", [2 * MiB + 1])
        memory.allocate("batch", [1])
    assert done == [MiB, 2 * MiB, 2 * MiB + PAGE_BYTES, 2 * MiB + 2 * PAGE_BYTES]


@pytest.mark.parametrize("extents", [[], [0], [5, 0]])
def test_nothing_asked_for_is_an_error_that_names_it(extents):
    with HostMemory(NoPinner()) as memory, pytest.raises(ValueError, match="moments: "):
        memory.allocate("moments", extents)


@pytest.mark.parametrize("piece_bytes", [0, 1, PAGE_BYTES + 1])
def test_pieces_are_whole_pages(piece_bytes):
    with pytest.raises(ValueError, match="page size"):
        HostMemory(NoPinner(), piece_bytes=piece_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["first", "second"])
def test_pinned_copies_keep_every_bit(run):
    """256 MiB through the device and back, over pieces of 64 MiB, in two runs of one process."""
    side = torch.cuda.Stream()
    with HostMemory(CudaPinner(), piece_bytes=64 * MiB) as memory:
        source, back = memory.allocate("masters", [128 * MiB - 24, 128 * MiB - 24])
        assert source.is_pinned() and memory.pinned_bytes == 256 * MiB
        source.view(torch.int64).random_()
        device = torch.empty_like(source, device="cuda")
        assert len(memory.pieces(source)) == len(memory.pieces(back)) == 2
        with torch.cuda.stream(side):
            for part, begin in memory.pieces(source):
                device[begin:begin + part.numel()].copy_(part, non_blocking=True)
            for part, begin in memory.pieces(back):
                part.copy_(device[begin:begin + part.numel()], non_blocking=True)
        # close waits for the copies
    assert torch.equal(source, back)
    assert not source.is_pinned()
