"""Text in: every file one document, all of them read into one array before training begins.

What is no corpus is refused by name, with file:line:column where there is one: directories, missing and empty files,
bytes that are not UTF-8, NUL bytes, a file that changes while it is read. Nothing is skipped, nothing is replaced.
"""
import codecs
import dataclasses
import hashlib
import os
import stat
import sysconfig
from collections.abc import Sequence

import numpy as np

# folders of the standard library that hold no library: installed packages, tests, programs
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
CHECK_BYTES = 4 << 20
# how well-known files that are not text begin, and what to do with them
NOT_TEXT = (*((bytes((0x80, protocol)), "a pickle, which is never loaded: write its text to a file") for protocol in range(2, 6)),
            (b"\x1f\x8b", "gzip: unpack it with gunzip"),
            (b"PK\x03\x04", "a zip archive: unpack it"),
            (b"\x28\xb5\x2f\xfd", "zstd: unpack it with unzstd"),
            (b"\xff\xfe", "UTF-16: convert it with iconv -f UTF-16 -t UTF-8"),
            (b"\xfe\xff", "UTF-16: convert it with iconv -f UTF-16 -t UTF-8"))


class DataError(Exception):
    """Text that cannot be trained on: one line that says what, where (file:line:column), and what would be right; the
    command exits with 2."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in memory, as UTF-8.

    text: uint8, the documents one after the other. begins, lengths: int64 [documents], in bytes. names: of their files.
    fingerprint: sha256 over lengths and text, hex. validation_is_training_text: nothing could be held out
    (data.batches.split).
    """
    text: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray
    names: list[str]
    fingerprint: str
    validation_is_training_text: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, i: int) -> bytes:
        begin = self.begins[i]
        return self.text[begin: begin + self.lengths[i]].tobytes()

    def part(self, begins: np.ndarray, lengths: np.ndarray, names: Sequence[str]) -> "Source":
        """Some documents, or pieces of them. Its fingerprint changes with any byte of the whole, without reading it again."""
        digest = hashlib.sha256(self.fingerprint.encode())
        for array in (begins, lengths):
            digest.update(array.astype("<i8"))
        return dataclasses.replace(self, begins=begins, lengths=lengths, names=list(names), fingerprint=digest.hexdigest())


def open_source(paths: Sequence[str] | None) -> Source:
    """Reads UTF-8 text files, one document each, in the order of their names; a byte order mark at the start is dropped.

    None: the sources of Python's standard library; of these alone, files that are empty or not UTF-8 are left out.
    Raises DataError.
    """
    given = paths is not None
    names = sorted(paths) if given else _library_files()
    if not names:
        raise DataError("--data: no file given" if given else "the sources of Python's standard library are not installed here; "
                        "name text files with --data")
    found = [_find(name) for name in names]
    if given:
        _refuse_twice(names, found)
    text = np.empty(sum(f.st_size for f in found), np.uint8)
    kept, lengths, end = [], [], 0
    for name, expected in zip(names, found, strict=True):
        document = text[end: end + expected.st_size]
        _read(name, expected, document)
        fault = _fault(name, document)
        if fault and given:
            raise DataError(fault)
        if fault:
            continue
        if document[:3].tobytes() == codecs.BOM_UTF8:
            document[:-3] = document[3:]
            document = document[:-3]
        kept.append(name)
        lengths.append(len(document))
        end += len(document)
    return _source(text[:end], np.array(lengths, np.int64), kept)


def _source(text: np.ndarray, lengths: np.ndarray, names: list[str]) -> Source:
    digest = hashlib.sha256(lengths.astype("<i8"))
    digest.update(text)
    return Source(text, np.cumsum(lengths) - lengths, lengths, names, digest.hexdigest())


def _library_files() -> list[str]:
    root, files = sysconfig.get_paths()["stdlib"], []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _find(name: str) -> os.stat_result:
    """What is there under this name; DataError unless it is a file that may hold text."""
    try:
        found = os.stat(name)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and os.path.islink(name):
            raise DataError(f"{name}: a link to {os.readlink(name)}, which does not exist; name the file itself") from None
        raise DataError(f"{name}: {error.strerror.lower()}; --data takes the names of UTF-8 text files") from None
    if stat.S_ISDIR(found.st_mode):
        raise DataError(f"{name}: a directory; pass its files: {os.path.join(name, '*.txt')}")
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{name}: not a regular file; write the text to a file first")
    if name.lower().endswith((".jsonl", ".ndjson")):
        raise DataError(f"{name}: JSONL is not read yet; write the texts of its records to .txt files, one document each")
    return found


def _refuse_twice(names: Sequence[str], found: Sequence[os.stat_result]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for name, f in zip(names, found, strict=True):
        first = seen.setdefault((f.st_dev, f.st_ino), name)
        if first is not name:
            # one of the two could be held out for validation while the other is trained on
            raise DataError(f"{name}: the same file as {first}; name each file once")


def _read(name: str, expected: os.stat_result, into: np.ndarray) -> None:
    """Fills `into` with the file; DataError if it is not the file that `expected` describes, before and after."""
    try:
        with open(name, "rb", buffering=0) as file:
            got = 0
            # one read gives at most 2 GiB
            while got < len(into) and (count := file.readinto(into[got:])):
                got += count
            complete = got == len(into) and not file.read(1)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise DataError(f"{name}: {error.strerror.lower()}; it has to be readable") from None
    if not complete or _stamp(after) != _stamp(expected):
        raise DataError(f"{name}: changed while it was read ({expected.st_size} bytes, then {after.st_size}); start again when "
                        "nothing writes to it")


def _stamp(f: os.stat_result) -> tuple[int, ...]:
    return f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns


def _fault(name: str, document: np.ndarray) -> str | None:
    """Why this is not a document, as file:line:column; None if it is one."""
    beginning = document[:4].tobytes()
    if beginning in (b"", codecs.BOM_UTF8):
        return f"{name}: empty; leave it out"
    at = _first_bad_byte(document)
    if at is None:
        return None
    before = document[:at].tobytes()
    line_begin = before.rfind(b"\n") + 1
    line = before.count(b"\n") + 1
    column = len(before[line_begin:].decode("utf-8-sig" if line == 1 else "utf-8")) + 1
    hint = next((hint for magic, hint in NOT_TEXT if beginning.startswith(magic)), "convert it, or leave it out if it is no text")
    what = "a NUL byte" if document[at] == 0 else f"byte 0x{document[at]:02x} is not UTF-8"
    return f"{name}:{line}:{column}: {what}; {hint}"


def _first_bad_byte(document: np.ndarray) -> int | None:
    """Offset of the first byte that is NUL or begins no UTF-8 character; in chunks, so that memory stays flat."""
    at = 0
    while at < len(document):
        chunk = document[at: at + CHECK_BYTES].tobytes()
        nul = chunk.find(0)
        try:
            # a character that the chunk cuts is left for the next one, unless there is none
            used = codecs.utf_8_decode(chunk, "strict", at + len(chunk) == len(document))[1]
        except UnicodeDecodeError as error:
            return at + (error.start if nul < 0 else min(error.start, nul))
        if nul >= 0:
            return at + nul
        at += used
    return None
