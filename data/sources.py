"""Text in: files of UTF-8, a document each, or the sources of Python's standard library.

Everything is read at once and checked then, so that training never meets a bad byte: what is no text is refused by
name and place.
"""
import dataclasses
import hashlib
import sysconfig
from pathlib import Path

# folders of the standard library that are tests, tools or not Python's own
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


class DataError(Exception):
    """Text that cannot be trained on: one line that says what, where (file:line:column) and what would be right; the
    command exits with 2."""


@dataclasses.dataclass(frozen=True)
class Document:
    """name: where it comes from, for messages. text: UTF-8 bytes."""
    name: str
    text: bytes


def open_source(paths: list[str] | None) -> list[Document]:
    """The documents of these files, in this order; of Python's standard library without paths.

    DataError for a file that is missing, empty, a directory, no UTF-8 text, or that changes while it is read.
    """
    if paths is None:
        return _standard_library()
    return [Document(path, _read(Path(path))) for path in paths]


def fingerprint(documents: list[Document]) -> str:
    """sha256 over lengths and bytes, in order: equal texts, equal fingerprint, whatever the files are called."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document.text).to_bytes(8, "little"))
        digest.update(document.text)
    return digest.hexdigest()


def split(documents: list[Document], every: int = 50) -> tuple[list[Document], list[Document]]:
    """(to train on, to validate on): every 50th document is held out; of a single one the last 1/50, whole lines.

    Where that leaves nothing to train on, the text validates itself.
    """
    if len(documents) > 1:
        held_out = documents[every - 1::every] or documents[-1:]
        kept = [d for d in documents if d not in held_out]
        return kept or documents, held_out
    only = documents[0]
    at = only.text.find(b"\n", len(only.text) - len(only.text) // every) + 1
    if at in (0, len(only.text)):
        return documents, documents
    return [Document(only.name, only.text[:at])], [Document(f"{only.name} (end)", only.text[at:])]


def _standard_library() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            text = path.read_bytes()
            if text and _bad_byte(text) is None:
                documents.append(Document(str(path.relative_to(root)), text))
    if not documents:
        raise DataError(f"{root}: no sources of the standard library there; give text with --data FILE")
    return documents


def _read(path: Path) -> bytes:
    if path.suffix == ".jsonl":
        raise DataError(f"{path}: JSONL is not read; write its texts to files, one document each")
    if path.is_dir():
        raise DataError(f"{path}: a directory; name its files, as {path}/*.txt")
    try:
        before = path.stat()
        text = path.read_bytes()
        after = path.stat()
    except FileNotFoundError as error:
        what = f"a link to {path.readlink()}, which is not there" if path.is_symlink() else "no such file"
        raise DataError(f"{path}: {what}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or len(text) != after.st_size:
        raise DataError(f"{path}: changed while it was read ({before.st_size} bytes, then {after.st_size}); wait for its writer")
    if not text:
        raise DataError(f"{path}: empty; there is no text to train on")
    bad = _bad_byte(text)
    if bad is not None:
        at, what = bad
        line, column = text.count(b"\n", 0, at) + 1, at - (text.rfind(b"\n", 0, at) + 1) + 1
        raise DataError(f"{path}:{line}:{column}: {what}; wanted UTF-8 text")
    return text


def _bad_byte(text: bytes) -> tuple[int, str] | None:
    """(offset, what) of the first byte that no UTF-8 text has; None if there is none."""
    nul = text.find(b"\0")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if nul < 0 or error.start < nul:
            return error.start, f"byte 0x{text[error.start]:02x} is no UTF-8 ({error.reason})"
    return None if nul < 0 else (nul, "a NUL byte")
