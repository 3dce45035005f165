"""Checkpoints: files on disk, whole or not there.

    RUN/lock                                who writes here
    RUN/config.json                         what the run was started with
    RUN/checkpoints/step-00000005/
        NAME.safetensors                    a record: tensors by name
        meta.json                           config, step, data position, random states
        manifest.json                       size of each file, sha256 of each of its parts: header and tensors
    RUN/checkpoints/step-00000005.partial/  being written, or being removed: never loaded
    RUN/checkpoints/step-00000005.old/      was step-00000005 until the step was saved again; whole until that is there

Order of a save: files, each with fsync; manifest last; fsync of the directory; all is read back; rename; fsync of its
parent; older ones go. So a name without a suffix is whole, and a kill at any instant leaves the previous checkpoint as
it was. No file holds a pickle; memory is bounded by one record and _CHUNK_BYTES.
"""
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError
from runtime.telemetry import METRICS_FILE

FORMAT = 1
MANIFEST, META, LOCK, CONFIG, CHECKPOINTS = "manifest.json", "meta.json", "lock", "config.json", "checkpoints"
Record = dict[str, torch.Tensor]

_CHUNK_BYTES = 16 << 20
# what a record takes beside its tensors (header), and a checkpoint beside its records (meta.json, manifest.json)
_EXTRA_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
# names of the safetensors format
_DTYPES = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
           "BOOL": torch.bool, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# writing

def save(run_dir: Path | str, step: int, records: Iterable[tuple[str, Callable[[], Record]]], meta: Mapping[str, Any],
         keep: int = 2) -> Path:
    """Writes the checkpoint of `step`, then removes all but it and the newest others, `keep` in all; returns its directory.

    records: name and what makes the record's tensors (CPU, contiguous, any memory), called one at a time, in order.
    Raises UserError where the disk does not take it; what a record's maker raises passes through. Either way nothing is
    left behind and older checkpoints are whole.
    """
    parent = Path(run_dir) / CHECKPOINTS
    target = parent / f"step-{step:08d}"
    partial = target.with_name(target.name + ".partial")
    try:
        with _disk(partial):
            parent.mkdir(exist_ok=True)
            _clean(parent)
            partial.mkdir()
        _write_all(partial, step, records, meta)
        verify(partial, deep=True)
        with _disk(target):
            _publish(partial, target)
            _retire(parent, target, keep)
    except UserError as error:
        raise UserError(f"checkpoint of step {step} not written: {error}. {_previous(parent, step)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turns what the file system says about `path` into a UserError that names it. (Makers raise OSErrors of their own.)"""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}") from error


def _write_all(directory: Path, step: int, records: Iterable[tuple[str, Callable[[], Record]]], meta: Mapping[str, Any]) -> None:
    text = _json(meta)
    files = {META: {"bytes": len(text), "sha256": {"text": _write(directory / META, [("text", text)])["text"]}}}
    of_record: dict[str, str] = {}
    for name, make in records:
        file = name.replace(" ", "-") + ".safetensors"
        if file in files or not re.fullmatch(r"[A-Za-z0-9._-]+", file):
            raise ValueError(f"record {name!r}: names are unique and of letters, digits, space, dot, - and _")
        of_record[name] = file
        files[file] = _write_record(directory / file, make())
    manifest = {"format": FORMAT, "step": step, "records": of_record, "files": files}
    _write(directory / MANIFEST, [("text", _json(manifest | {"sha256": _digest(manifest)}))])
    _fsync_directory(directory)


def _write_record(path: Path, tensors: Record) -> dict[str, Any]:
    """Writes a safetensors file; returns its entry in the manifest."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, offset = [], 0
    for name, t in tensors.items():
        if t.device.type != "cpu" or not t.is_contiguous() or t.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{path.stem} {name}: a contiguous CPU tensor is expected, got {t.dtype} {t.device} {t.stride()}")
        end = offset + t.numel() * t.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, end]}
        parts.append((name, memoryview(t.reshape(-1).view(torch.uint8).numpy())))
        offset = end
    text = _json(header)
    # 8 bytes of length, then the header, padded so that tensors begin at a multiple of 64
    text += b" " * (-(8 + len(text)) % 64)
    head = len(text).to_bytes(8, "little") + text
    return {"bytes": len(head) + offset, "sha256": _write(path, [("header", head), *parts])}


def _write(path: Path, parts: list[tuple[str, bytes | memoryview]]) -> dict[str, str]:
    """Writes the parts one behind the other, with fsync; returns the sha256 of each."""
    digests = {}
    with _disk(path), _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        for name, data in parts:
            digest = hashlib.sha256()
            for begin in range(0, len(data), _CHUNK_BYTES):
                chunk = memoryview(data)[begin:begin + _CHUNK_BYTES]
                digest.update(chunk)
                while chunk:
                    chunk = chunk[os.write(fd, chunk):]
            digests[name] = digest.hexdigest()
        os.fsync(fd)
        # host memory is for the model; pages of a finished file would push at it
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return digests


def _publish(partial: Path, target: Path) -> None:
    old = target.with_name(target.name + ".old")
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    _fsync_directory(target.parent)


def _retire(parent: Path, new: Path, keep: int) -> None:
    """Removes whole ones until the new one and the newest others are `keep`; what is not whole is left to the user."""
    verify(new, deep=False)
    others = [path for path in _scan(parent)[0] if path != new]
    old = new.with_name(new.name + ".old")
    for path in others[max(keep, 1) - 1:] + [old] * old.exists():
        # a kill in the middle leaves a name that is never loaded
        doomed = path.with_name(new.name + ".removed.partial")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def _clean(parent: Path) -> None:
    """Removes what a killed save left, and gives a step that was being replaced its name back."""
    for path in parent.glob("*.partial"):
        shutil.rmtree(path)
    for path in parent.glob("*.old"):
        if path.with_suffix("").exists():
            shutil.rmtree(path)
        else:
            os.rename(path, path.with_suffix(""))


def _fsync_directory(path: Path) -> None:
    with _disk(path), _opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, indent=1).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# finding and reading

def find(run_dir: Path | str) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint, by step, and what lies there but is not whole, each with the reason.

    Sizes, manifest and meta.json are looked at; the records' checksums when they are read.
    """
    whole, broken = _scan(Path(run_dir) / CHECKPOINTS)
    return (whole[0] if whole else None), broken


def _scan(parent: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Whole ones, newest first; the others with the reason."""
    whole: dict[int, Path] = {}
    broken: list[tuple[Path, str]] = []
    for path in sorted(parent.glob("step-*")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            if path.name.endswith(".partial"):
                broken.append((path, "was not finished"))
            continue
        try:
            verify(path, deep=False)
            # sorted: the plain name comes before .old
            whole.setdefault(int(match[1]), path)
        except UserError as error:
            broken.append((path, str(error)))
    return [whole[step] for step in sorted(whole, reverse=True)], broken


def verify(path: Path | str, deep: bool) -> None:
    """Raises UserError, naming file and tensor, unless the checkpoint is whole. deep: every byte is read."""
    path = Path(path)
    manifest = _manifest(path)
    for file, entry in manifest["files"].items():
        _check_size(path / file, entry["bytes"])
    _read_text(path / META, manifest["files"][META]["sha256"]["text"])
    for file in manifest["records"].values() if deep else ():
        _read_record(path / file, manifest["files"][file], tensors=False)


def load(path: Path | str) -> tuple[dict[str, Any], "Records"]:
    """meta, and the records, each read and checked when it is asked for. UserError, which names the checkpoint before
    this one, if something is missing or wrong."""
    path = Path(path)
    try:
        verify(path, deep=False)
        return json.loads((path / META).read_bytes()), Records(path, _manifest(path))
    except UserError as error:
        raise _with_previous(error, path) from error


class Records:
    """Tensors of each record by the record's name."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path, self._manifest = path, manifest

    def __getitem__(self, name: str) -> Record:
        """Reads the record into new memory. UserError for a wrong checksum, naming file and tensor, and for no such record."""
        try:
            file = self._manifest["records"].get(name)
            if file is None:
                raise UserError(f"{self.path}: holds no record {name!r}, but {', '.join(self)}")
            return _read_record(self.path / file, self._manifest["files"][file], tensors=True)
        except UserError as error:
            raise _with_previous(error, self.path) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest["records"])

    def __len__(self) -> int:
        return len(self._manifest["records"])

    def __contains__(self, name: str) -> bool:
        return name in self._manifest["records"]


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    text = _read_text(file)
    try:
        manifest = json.loads(text)
        told = manifest.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{file}: is no manifest") from error
    if _digest(manifest) != told:
        raise UserError(f"{file}: its checksum is wrong: some byte has changed")
    if manifest["format"] != FORMAT:
        raise UserError(f"{file}: format {manifest['format']}, this version reads {FORMAT}")
    if any(Path(name).name != name for name in manifest["files"]):
        raise UserError(f"{file}: names files outside its directory")
    return manifest


def _read_text(path: Path, sha256: str | None = None) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if sha256 is not None and hashlib.sha256(text).hexdigest() != sha256:
        raise UserError(f"{path}: its checksum is wrong: some byte has changed")
    return text


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if size != num_bytes:
        raise UserError(f"{path}: {size} bytes, {num_bytes} were written")


def _read_record(path: Path, entry: Mapping[str, Any], tensors: bool) -> Record:
    """Reads and checks the file part by part; without `tensors` one chunk is held at a time and nothing is returned."""
    _check_size(path, entry["bytes"])
    out: Record = {}
    try:
        with open(path, "rb", buffering=0) as f:
            length = int.from_bytes(f.read(8), "little")
            if length > entry["bytes"] - 8:
                raise UserError(f"{path}: header: its length is wrong: some byte has changed")
            text = f.read(length)
            _check(path, "header", hashlib.sha256(length.to_bytes(8, "little") + text), entry)
            for name, told in json.loads(text).items():
                if name == "__metadata__":
                    continue
                begin, end = told["data_offsets"]
                data = torch.empty(end - begin if tensors else min(end - begin, _CHUNK_BYTES), dtype=torch.uint8)
                _check(path, name, _read_into(f, memoryview(data.numpy()), end - begin, again=not tensors), entry)
                if tensors:
                    out[name] = data.view(_DTYPES[told["dtype"]]).view(told["shape"])
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    return out


def _read_into(f, buffer: memoryview, num_bytes: int, again: bool) -> "hashlib._Hash":
    """Fills `buffer` from the file; `again`: over and over from its beginning. Returns the digest of the bytes."""
    digest, done = hashlib.sha256(), 0
    while done < num_bytes:
        begin = 0 if again else done
        got = f.readinto(buffer[begin:begin + min(_CHUNK_BYTES, num_bytes - done)])
        if not got:
            break
        digest.update(buffer[begin:begin + got])
        done += got
    return digest


def _check(path: Path, part: str, digest: "hashlib._Hash", entry: Mapping[str, Any]) -> None:
    if digest.hexdigest() != entry["sha256"].get(part):
        raise UserError(f"{path}: {part}: its checksum is wrong: some byte has changed")


def _previous(parent: Path, step: int) -> str:
    """Tells the newest whole checkpoint before `step`."""
    earlier = [path for path in _scan(parent)[0] if int(_NAME.fullmatch(path.name)[1]) < step]
    return f"previous checkpoint: {earlier[0]}" if earlier else "there is no previous checkpoint"


def _with_previous(error: UserError, path: Path) -> UserError:
    match = _NAME.fullmatch(path.name)
    return UserError(f"{error}. {_previous(path.parent, int(match[1]))}") if match else error


# before training

def required_bytes(record_bytes: Iterable[int]) -> int:
    """What one checkpoint takes on disk. record_bytes: of the tensors of each record."""
    return _EXTRA_BYTES + sum(size + _EXTRA_BYTES for size in record_bytes)


def check_space(run_dir: Path | str, num_bytes: int, *, keep: int = 2, saves: int = 1) -> None:
    """Raises UserError unless the disk of `run_dir` can be written and has room for the checkpoints to come.

    num_bytes: of one checkpoint. saves: how many this run will make; at most keep + 1 exist at a time, those that are
    there already among them.
    """
    run_dir = Path(run_dir)
    there = min(len(_scan(run_dir / CHECKPOINTS)[0]), keep)
    wanted = num_bytes * min(saves, keep + 1 - there)
    # what is refused leaves nothing behind, so the directory itself may not be there yet
    disk = next(path for path in (run_dir / CHECKPOINTS, *(run_dir / CHECKPOINTS).absolute().parents) if path.exists())
    if not disk.is_dir() or not os.access(disk, os.W_OK | os.X_OK):
        raise UserError(f"{disk}: checkpoints cannot be written here: a directory that this user may write is needed")
    free = shutil.disk_usage(disk).free
    if free < wanted:
        raise UserError(f"{run_dir}: checkpoints need {wanted / 1e9:.3f} GB, {free / 1e9:.3f} GB are free: "
                        f"{(wanted - free) / 1e9:.3f} GB are missing")


def check_same_run(saved: Mapping[str, Any], config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raises UserError that lists each of `keys` in which the two differ, as `name: saved -> now`. `a.b`: b within a."""
    saved, config = (json.loads(json.dumps(c)) for c in (saved, config))
    pairs = {key: (_field(saved, key), _field(config, key)) for key in keys}
    differ = [f"{key}: {was} -> {now}" for key, (was, now) in pairs.items() if was != now]
    if differ:
        raise UserError(f"the checkpoint is of another run: {'; '.join(differ)}")


def _field(config: Any, key: str) -> str:
    for name in key.split("."):
        if not isinstance(config, dict) or name not in config:
            return "(not there)"
        config = config[name]
    return json.dumps(config, ensure_ascii=False)


class RunLock:
    """Holds a run directory for this process: `with RunLock(run_dir):`. The kernel lets go when the process ends, however.

    stale: "pid 12 on host" of a holder that ended without letting go, else None.
    """

    def __init__(self, run_dir: Path | str):
        """Raises UserError, with pid and host of the holder, if another process has it."""
        self.path = Path(run_dir) / LOCK
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}: a run needs a directory it can write") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held_by = self._holder() if error.errno == errno.EWOULDBLOCK else None
            os.close(self._fd)
            if held_by is None:
                raise UserError(f"{self.path}: {error.strerror}: a run needs a file system that can lock") from error
            raise UserError(f"{self.path.parent}: {held_by} is writing here: wait for it, stop it, or take another "
                            "directory") from error
        self.stale = self._told()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _told(self) -> str | None:
        return os.pread(self._fd, 1000, 0).decode(errors="replace") or None

    def _holder(self) -> str:
        # it writes its name a moment after it has the lock
        for _ in range(20):
            if told := self._told():
                return told
            time.sleep(0.05)
        return "another process"

    def release(self) -> None:
        """Lets go; the file stays, empty: removing it could take it from somebody who has just opened it."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_) -> None:
        self.release()


def newest(run_dir: Path | str) -> tuple[dict[str, Any], Records]:
    """meta and records of the run's newest whole checkpoint. UserError if it has none, naming what is not whole."""
    path, broken = find(run_dir)
    if path is None:
        why = "".join(f"; {b.name}: {reason}" for b, reason in broken)
        raise UserError(f"--resume {run_dir}: no whole checkpoint there{why}")
    return load(path)


def claim(run_dir: Path | str, config: Mapping[str, Any], resuming: bool) -> None:
    """Writes config.json; UserError if the directory holds another run and this is not its resumption. A run that ended
    before its first step holds nothing."""
    path, metrics = Path(run_dir) / CONFIG, Path(run_dir) / METRICS_FILE
    begun = (path.parent / CHECKPOINTS).exists() or (metrics.exists() and metrics.stat().st_size > 0)
    if begun and not resuming:
        raise UserError(f"--run {run_dir}: holds a run already; go on with it by --resume {run_dir}, or take another directory")
    path.write_bytes(_json(config))
