"""What this machine has: cores, host memory and who limits it, the GPU. Nothing here takes time or memory.

Host memory is the least of three: what the kernel calls available, what the cgroups of this process leave, and, instead
of the first, what --host-memory says (MemTotal of a virtual machine can be smaller than what it grows to).

    cgroup v2   usable = memory.max - memory.current + inactive_file of memory.stat
    cgroup v1   usable = memory/memory.limit_in_bytes - memory/memory.usage_in_bytes + total_inactive_file

The page cache that a cgroup is charged for (inactive_file) makes way when memory is asked for. Cgroups are nested: the
process's own and each one above it count.
"""
import dataclasses
import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from model.errors import UserError

CGROUP_ROOT, OWN_CGROUPS, MEMINFO = "/sys/fs/cgroup", "/proc/self/cgroup", "/proc/meminfo"
# cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63
V1_UNLIMITED_BYTES = 1 << 62
# the first GPUs whose tensor cores take bf16
BF16_CAPABILITY = (8, 0)


@dataclasses.dataclass(frozen=True)
class CgroupMemory:
    """The tightest memory limit around this process. usable_bytes: what it leaves now. source: the limit's name."""
    limit_bytes: int
    usable_bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a plan may use. host_limit_source: who says host_bytes. GPU fields are None and 0 where there is no GPU."""
    name: str
    cpu_cores: int
    host_bytes: int
    host_limit_source: str
    gpu_name: str | None = None
    hbm_bytes: int = 0
    hbm_free_bytes: int = 0
    capability: tuple[int, int] | None = None


def detect(host_memory: int | None = None, *, use_gpu: bool = True, cgroup_root: str = CGROUP_ROOT, meminfo: str = MEMINFO,
           own_cgroups: str = OWN_CGROUPS) -> Machine:
    """This machine as it is now.

    host_memory: --host-memory in bytes, in place of what the kernel calls available; a cgroup's limit below it wins.
    use_gpu: False leaves CUDA alone. UserError if the GPU does not answer.
    """
    host_bytes, source = usable_host_bytes(host_memory, cgroup_root=cgroup_root, meminfo=meminfo, own_cgroups=own_cgroups)
    machine = Machine(platform.node(), cpu_cores(cgroup_root, own_cgroups), host_bytes, source)
    if not (use_gpu and torch.cuda.is_available()):
        return machine
    try:
        gpu = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"the GPU does not answer ({reason}); end what occupies it, or train with --device cpu") from error
    return dataclasses.replace(machine, gpu_name=gpu.name, hbm_bytes=total, hbm_free_bytes=free,
                               capability=(gpu.major, gpu.minor))


def check_gpu(machine: Machine, precision: str) -> None:
    """UserError if the GPU cannot compute in `precision` (bf16 or fp32)."""
    if precision == "bf16" and machine.capability is not None and machine.capability < BF16_CAPABILITY:
        major, minor = machine.capability
        raise UserError(f"--precision bf16: {machine.gpu_name} (compute capability {major}.{minor}) has no bf16 tensor cores, "
                        f"8.0 is the first that has; use --precision fp32")


def usable_host_bytes(host_memory: int | None = None, *, cgroup_root: str = CGROUP_ROOT, meminfo: str = MEMINFO,
                      own_cgroups: str = OWN_CGROUPS) -> tuple[int, str]:
    """Bytes of host memory that a plan may use, and who says so. host_memory: --host-memory, in place of `meminfo`."""
    if host_memory is None:
        have, source = available_bytes(meminfo), "available now"
    else:
        have, source = host_memory, "--host-memory"
    cgroup = cgroup_memory(cgroup_root, own_cgroups)
    if cgroup is None or cgroup.usable_bytes >= have:
        return have, source
    asked = "" if host_memory is None else f", below --host-memory {format_bytes(host_memory)}"
    return cgroup.usable_bytes, f"{cgroup.source} {format_bytes(cgroup.limit_bytes)} less what is used{asked}"


def available_bytes(meminfo: str = MEMINFO) -> int:
    """What the kernel could give without swapping; all memory where /proc does not say."""
    if not os.path.exists(meminfo):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in Path(meminfo).read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def cgroup_memory(cgroup_root: str = CGROUP_ROOT, own_cgroups: str = OWN_CGROUPS) -> CgroupMemory | None:
    """The cgroup limit that leaves least; None where nothing is limited."""
    found = []
    for folder in _folders(cgroup_root, own_cgroups, None):
        # above memory.high the kernel slows the process down until pages are given back, which pinned ones never are
        for name in ("memory.max", "memory.high"):
            found.append(_limit(folder, name, "memory.current", "inactive_file", "cgroup " + name))
    for folder in _folders(cgroup_root, own_cgroups, "memory"):
        name = "memory.limit_in_bytes"
        found.append(_limit(folder, name, "memory.usage_in_bytes", "total_inactive_file", "cgroup " + name))
    return min(filter(None, found), key=lambda limit: limit.usable_bytes, default=None)


def cpu_cores(cgroup_root: str = CGROUP_ROOT, own_cgroups: str = OWN_CGROUPS) -> int:
    """Cores this process may keep busy: its affinity, and the whole cores of its cgroups' quotas; at least 1."""
    # macOS has no affinity
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_words(folder / "cpu.max") for folder in _folders(cgroup_root, own_cgroups, None)]
    for folder in _folders(cgroup_root, own_cgroups, "cpu"):
        quotas.append(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))
    for quota in quotas:
        # [microseconds, of a period in microseconds]; "max" and -1 are no quota
        if len(quota) == 2 and quota[0].isdigit():
            cores = min(cores, int(quota[0]) // int(quota[1]))
    return max(cores, 1)


def memlock_bytes() -> int | None:
    """RLIMIT_MEMLOCK (ulimit -l); None where it is unlimited or unknown."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit



def parse_bytes(text: str, flag: str) -> int:
    """Bytes of "90GiB", "128GB", "1.5TiB", "64g": GB is 1e9, GiB and a bare g are 2^30, a bare number is bytes.

    UserError naming `flag` for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"([0-9]{1,20})(?:\.([0-9]{1,20}))?\s*(?:([kmgt])(ib?|b)?|b)?", text.strip().lower())
    if match:
        whole, fraction, prefix, rest = match.groups()
        unit = (1000 if rest == "b" else 1024) ** (" kmgt".index(prefix) if prefix else 0)
        digits = fraction or ""
        # in integers: 1.5 TiB has no rounding
        num_bytes = int(whole + digits) * unit // 10 ** len(digits)
        if num_bytes > 0:
            return num_bytes
    raise UserError(f"{flag} {text!r}: not a size; write it like 90GiB, 128GB, 1.5TiB or 64g")


def format_bytes(num_bytes: int) -> str:
    """12.3 GiB: one decimal, and the unit in which the number is below 1024."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    # 1023.95 would be printed as 1024.0
    power = min(int(math.log(num_bytes / 1023.95, 1024)) + 1, 5)
    return f"{num_bytes / 1024 ** power:.1f} {' KMGTP'[power]}iB"


def _folders(cgroup_root: str, own_cgroups: str, controller: str | None) -> Iterator[Path]:
    """The cgroup of this process and those above it, up to the root; controller: of v1, None for v2.

    A container sees its own cgroup as the root but may be told its path from outside: folders that are not there have no
    files to read.
    """
    root = Path(cgroup_root) / (controller or "")
    path = ""
    if os.path.exists(own_cgroups):
        for line in Path(own_cgroups).read_text().splitlines():
            _, names, own = line.split(":", 2)
            if (names == "") if controller is None else (controller in names.split(",")):
                path = own
    parts = [part for part in path.split("/") if part]
    # a process outside of its cgroup namespace is shown as /../other
    if ".." in parts:
        parts = []
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])


def _limit(folder: Path, limit_name: str, usage_name: str, cache_name: str, source: str) -> CgroupMemory | None:
    limit = (_words(folder / limit_name) + ["max"])[0]
    if limit == "max" or int(limit) >= V1_UNLIMITED_BYTES:
        return None
    used = int((_words(folder / usage_name) + ["0"])[0])
    stat = _words(folder / "memory.stat")
    cache = int(dict(zip(stat[::2], stat[1::2], strict=False)).get(cache_name, 0))
    return CgroupMemory(int(limit), max(int(limit) - used + cache, 0), source)


def _words(file: Path) -> list[str]:
    """The file's words; none if it is not there or may not be read."""
    try:
        return file.read_text().split()
    except OSError:
        return []
