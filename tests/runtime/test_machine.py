"""The machine: whose limit counts, and the sizes that people write."""
import dataclasses
from pathlib import Path

import pytest
import torch

from model.errors import UserError
from runtime.machine import (
    Machine,
    available_bytes,
    cgroup_memory,
    check_gpu,
    cpu_cores,
    detect,
    format_bytes,
    memlock_bytes,
    parse_bytes,
    usable_host_bytes,
)

GiB = 1 << 30


def folder(root: Path, files: dict[str, str]) -> str:
    """A stand-in for /sys/fs/cgroup."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return str(root)


def cgroups(root: Path, *lines: str) -> str:
    """A stand-in for /proc/self/cgroup."""
    (root / "own").write_text("".join(line + "\n" for line in lines))
    return str(root / "own")


@pytest.fixture
def meminfo(tmp_path):
    """64 GiB available of 100."""
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       104857600 kB\nMemFree:         1000 kB\nMemAvailable:   67108864 kB\nHugePages_Total:   0\n")
    return str(file)


LIMITED = {"memory.max": "1073741824", "memory.current": "209715200"}
V1_UNLIMITED = {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "209715200"}


@pytest.mark.parametrize(("files", "usable"), [
    (LIMITED, 864_026_624),
    (LIMITED | {"memory.stat": "anon 4096\ninactive_file 1048576\nactive_file 8192"}, 864_026_624 + 1_048_576),
    (LIMITED | {"memory.max": "max"}, None),
    (V1_UNLIMITED, None),
    ({"memory/memory.limit_in_bytes": "1073741824", "memory/memory.usage_in_bytes": "209715200"}, 864_026_624),
    ({"memory/memory.limit_in_bytes": "1073741824", "memory/memory.usage_in_bytes": "209715200",
      "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 4096"}, 864_026_624 + 4096),
    # over its limit already: nothing is left, which is not less than nothing
    ({"memory.max": "1073741824", "memory.current": "1073741825"}, 0),
    ({"memory.max": "max", "memory.high": "1073741824", "memory.current": "209715200"}, 864_026_624),
    ({}, None),
], ids=["v2", "v2 with stat", "v2 max", "v1 unlimited", "v1", "v1 with stat", "over", "high", "no cgroup"])
def test_MEM6_cgroup_is_the_machine(files, usable, tmp_path, meminfo):
    root, own = folder(tmp_path / "fs", files) if files else str(tmp_path / "fs"), cgroups(tmp_path, "0::/")
    found = cgroup_memory(root, own)
    assert (None if found is None else found.usable_bytes) == usable
    have, source = usable_host_bytes(cgroup_root=root, meminfo=meminfo, own_cgroups=own)
    assert have == (64 * GiB if usable is None else usable)
    assert source.startswith("available" if usable is None else "cgroup memory.")


@pytest.mark.parametrize(("prefix", "line", "names"), [
    ("", "0::/a/b", ("memory.max", "memory.current")),
    ("memory/", "4:cpuset,memory:/a/b", ("memory.limit_in_bytes", "memory.usage_in_bytes"))], ids=["v2", "v1"])
@pytest.mark.parametrize("tightest", ["", "a/", "a/b/"])
def test_MEM6_the_tightest_of_nested_cgroups_counts(prefix, line, names, tightest, tmp_path):
    files = {}
    for place in ("", "a/", "a/b/", "a/other/"):
        limit = {tightest: 3000, "a/other/": 1000}.get(place, 5000)
        files |= {f"{prefix}{place}{names[0]}": str(limit), f"{prefix}{place}{names[1]}": "500"}
    found = cgroup_memory(folder(tmp_path / "fs", files), cgroups(tmp_path, "1:name=systemd:/", line))
    assert (found.limit_bytes, found.usable_bytes) == (3000, 2500)


@pytest.mark.parametrize("line", ["0::/docker/0123", "0::/../elsewhere", "3:pids:/x"])
def test_MEM6_a_path_from_outside_the_container_leaves_its_root(line, tmp_path):
    root = folder(tmp_path / "fs", LIMITED)
    folder(tmp_path, {"elsewhere/memory.max": "1", "elsewhere/memory.current": "0"})
    assert cgroup_memory(root, cgroups(tmp_path, line)).usable_bytes == 864_026_624


def test_MEM6_host_memory_overrides_the_kernel_but_not_the_cgroup(tmp_path, meminfo):
    own = cgroups(tmp_path, "0::/")
    where = dict(meminfo=meminfo, own_cgroups=own, use_gpu=False)
    free = detect(100 * GiB, cgroup_root=folder(tmp_path / "free", {"memory.max": "max"}), **where)
    assert (free.host_bytes, free.host_limit_source) == (100 * GiB, "--host-memory")
    tight = folder(tmp_path / "tight", LIMITED)
    machine = detect(100 * GiB, cgroup_root=tight, **where)
    assert machine.host_bytes == 864_026_624
    assert machine.host_limit_source == "cgroup memory.max 1.0 GiB less what is used, below --host-memory 100.0 GiB"
    assert detect(1 << 20, cgroup_root=tight, **where).host_bytes == 1 << 20
    assert detect(cgroup_root=tight, **where).host_limit_source == "cgroup memory.max 1.0 GiB less what is used"
    assert (machine.gpu_name, machine.hbm_bytes, machine.hbm_free_bytes, machine.capability) == (None, 0, 0, None)


def test_this_machine_is_found():
    machine = detect(use_gpu=False)
    assert 0 < machine.host_bytes <= available_bytes("not there") and machine.cpu_cores >= 1 and machine.name
    assert memlock_bytes() is None or memlock_bytes() >= 0


@pytest.mark.gpu
def test_this_gpu_is_found():
    machine = detect()
    assert machine.gpu_name == torch.cuda.get_device_name(0) and machine.capability == torch.cuda.get_device_capability(0)
    assert 0 < machine.hbm_free_bytes <= machine.hbm_bytes
    check_gpu(machine, "fp32")


def test_a_gpu_that_does_not_answer_is_one_line(monkeypatch):
    def full(device):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", full)
    with pytest.raises(UserError, match=r"^the GPU does not answer \(CUDA error: out of memory\); .*--device cpu$"):
        detect()


@pytest.mark.parametrize(("files", "line", "most"), [
    ({"cpu.max": "100000 100000"}, "0::/", 1),
    # half a core is still one thread
    ({"cpu.max": "50000 100000"}, "0::/", 1),
    ({"cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, "0::/a", 1),
    ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, "2:cpu,cpuacct:/", 1),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/", None),
    ({"cpu.max": "max 100000"}, "0::/", None),
    ({"cpu.max": "99900000 100000"}, "0::/", None)])
def test_cores_are_those_of_the_cgroup(files, line, most, tmp_path):
    unlimited = cpu_cores(str(tmp_path / "none"), str(tmp_path / "none"))
    assert cpu_cores(folder(tmp_path / "fs", files), cgroups(tmp_path, line)) == (most or unlimited)


@pytest.mark.parametrize(("text", "num_bytes"), [
    ("90GiB", 90 * GiB), ("128GB", 128_000_000_000), ("1.5TiB", 1536 * GiB), ("64g", 64 * GiB), ("64Gi", 64 * GiB),
    ("64 gib", 64 * GiB), (" 512M ", 512 << 20), ("16kb", 16_000), ("7", 7), ("7B", 7), ("0.1 GB", 100_000_000),
    ("137438953472", 128 * GiB)])
def test_sizes_as_people_write_them(text, num_bytes):
    assert parse_bytes(text, "--host-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0.4", "1e9", "nan", "inf", "12 apples", "1,5TiB", "64GBi", "1 2",
                                  "٣GiB", "9" * 5000])
def test_other_sizes_are_refused(text):
    with pytest.raises(UserError, match=r"--host-memory .*90GiB"):
        parse_bytes(text, "--host-memory")


@pytest.mark.parametrize(("num_bytes", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_048_524, "1023.9 KiB"), (1_048_575, "1.0 MiB"), (1 << 20, "1.0 MiB"),
    (13_207_024_435, "12.3 GiB"), (1536 * GiB, "1.5 TiB"), (1 << 60, "1024.0 PiB")])
def test_sizes_are_printed_with_one_decimal(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_a_gpu_without_bf16_is_named():
    t4 = Machine("t4", 4, 16 * GiB, "available now", "Tesla T4", 16 * GiB, 15 * GiB, (7, 5))
    with pytest.raises(UserError, match=r"Tesla T4 .*7\.5.*--precision fp32"):
        check_gpu(t4, "bf16")
    check_gpu(t4, "fp32")
    check_gpu(dataclasses.replace(t4, capability=(8, 0)), "bf16")
    check_gpu(Machine("laptop", 4, 16 * GiB, "available now"), "bf16")
