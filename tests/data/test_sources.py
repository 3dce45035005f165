"""What is read as text and what is refused, by name."""
import os
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from data import sources
from data.sources import DataError, open_source

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(name, bytes)`: a file in the working directory; gives its name."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, content: bytes) -> str:
        Path(name).write_bytes(content)
        return name
    return make


def refusal(*names: str) -> str:
    with pytest.raises(DataError) as refused:
        open_source(list(names))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_every_file_is_a_document_byte_for_byte(write):
    texts = {"b.txt": "zwei\r\nZeilen \u2028 \x85".encode(), "a.txt": b"one\n", "c.txt": "日本語 🙂".encode()}
    source = open_source([write(name, text) for name, text in texts.items()])
    assert source.names == ["a.txt", "b.txt", "c.txt"]
    assert [source.document(i) for i in range(3)] == [texts[name] for name in source.names]


def test_a_byte_order_mark_is_no_text(write):
    with_mark = open_source([write("a.txt", b"\xef\xbb\xbfone"), write("b.txt", b"two")])
    without = open_source([write("a.txt", b"one"), "b.txt"])
    assert [with_mark.document(0), with_mark.document(1)] == [b"one", b"two"]
    assert with_mark.fingerprint == without.fingerprint


def test_the_fingerprint_is_of_lengths_and_text_and_of_nothing_else(write):
    first = open_source([write("a.txt", b"ab"), write("b.txt", b"c")]).fingerprint
    write("a.txt", b"a"), write("b.txt", b"bc")
    moved = open_source(["a.txt", "b.txt"]).fingerprint
    os.utime(write("a.txt", b"ab"), (0, 0)), write("b.txt", b"c")
    os.rename("b.txt", "d.txt")
    assert moved != first == open_source(["d.txt", "a.txt"]).fingerprint
    write("d.txt", b"d")
    assert open_source(["a.txt", "d.txt"]).fingerprint != first


def test_DATA5_not_a_corpus(write, tmp_path):
    os.mkdir("texts")
    os.symlink("gone.txt", "broken.txt")
    os.mkfifo("pipe.txt")
    write("empty.txt", b""), write("mark.txt", b"\xef\xbb\xbf"), write("good.txt", b"good")
    write("records.jsonl", b'{"text": "a"}\n')
    assert refusal("good.txt", "texts") == "texts: a directory; pass its files: texts/*.txt"
    assert refusal("broken.txt").startswith("broken.txt: a link to gone.txt, which does not exist")
    assert refusal("good.txt", "missing.txt").startswith("missing.txt: no such file")
    assert refusal("pipe.txt").startswith("pipe.txt: not a regular file")
    assert refusal("empty.txt").startswith("empty.txt: empty")
    assert refusal("mark.txt").startswith("mark.txt: empty")
    assert refusal("records.jsonl").startswith("records.jsonl: JSONL is not read yet")
    assert refusal("good.txt", "./good.txt") == "good.txt: the same file as ./good.txt; name each file once"
    assert refusal().startswith("--data: no file")


def test_DATA5_a_pickle_is_never_loaded(write):
    shutil.copy(CASES / "pickle.bin", "pickle.bin")
    assert refusal("pickle.bin").startswith("pickle.bin:1:1: byte 0x80 is not UTF-8; a pickle, which is never loaded: write its")


@pytest.mark.parametrize(("content", "place", "what"), [
    (b"ab\nc\x00d\xff", "2:2", "a NUL byte"),
    (b"ab\nc\xffd\x00", "2:2", "byte 0xff"),
    (b"good but for\x00", "1:13", "a NUL byte"),
    ("äöü\nüä".encode() + b"\xe4", "2:3", "byte 0xe4"),
    (b"\xef\xbb\xbfab\xc0\x80", "1:3", "byte 0xc0"),
    (b"\xed\xa0\x80", "1:1", "byte 0xed"),
    ("text".encode("utf-16"), "1:1", "byte 0xff is not UTF-8; UTF-16"),
    (b"\x1f\x8b\x08\x00", "1:2", "byte 0x8b is not UTF-8; gzip"),
    (b"whole\n" + "🙂".encode()[:3], "2:1", "byte 0xf0"),
], ids=["nul", "invalid", "nul alone", "latin-1", "after a mark", "surrogate", "utf-16", "gzip", "cut"])
@pytest.mark.parametrize("chunk", [4, 1 << 20])
def test_DATA5_the_first_bad_byte_is_placed(write, monkeypatch, content, place, what, chunk):
    monkeypatch.setattr(sources, "CHECK_BYTES", chunk)
    assert refusal(write("bad.txt", content)).startswith(f"bad.txt:{place}: {what}")


@pytest.mark.parametrize("chunk", [4, 5, 7])
def test_characters_on_a_chunk_border_are_whole(write, monkeypatch, chunk):
    monkeypatch.setattr(sources, "CHECK_BYTES", chunk)
    text = "aä日🙂" * 5
    assert open_source([write("a.txt", text.encode())]).document(0).decode() == text


@pytest.mark.parametrize("after", [b"more and more", b"cut", b"same length"], ids=["grows", "is cut", "is rewritten"])
def test_DATA5_a_file_that_changes_while_it_is_read(write, monkeypatch, after):
    os.utime(write("first.txt", b"first"))
    os.utime(write("log.txt", b"some length"), ns=(1, 1))

    def opened(name, *args, **kwargs):
        file = open(name, *args, **kwargs)
        if name == "log.txt":
            Path(name).write_bytes(after)
        return file
    monkeypatch.setattr(sources, "open", opened, raising=False)
    assert refusal("first.txt", "log.txt").startswith(f"log.txt: changed while it was read (11 bytes, then {len(after)})")


def test_without_files_it_is_the_standard_library():
    source = open_source(None)
    root = sysconfig.get_paths()["stdlib"]
    modules = {os.path.relpath(name, root) for name in source.names}
    assert {"argparse.py", "json/decoder.py"} <= modules
    assert not [name for name in modules if {"site-packages", "test", "tests", "idlelib"} & set(name.split("/"))]
    assert source.names == sorted(source.names) and source.lengths.min() > 0
    # one array, no gaps where files were left out
    assert source.lengths.sum() == len(source.text) and np.array_equal(source.begins[1:], np.cumsum(source.lengths)[:-1])
    argparse = os.path.join(root, "argparse.py")
    assert source.document(source.names.index(argparse)) == Path(argparse).read_bytes()


def test_of_the_standard_library_alone_odd_files_are_left_out(write, monkeypatch):
    names = [write("empty.py", b""), write("good.py", b"pass\n"), write("latin.py", b"# \xe4\n"), write("other.py", b"x = 1\n")]
    monkeypatch.setattr(sources, "_library_files", lambda: names)
    source = open_source(None)
    assert [source.document(i) for i in range(len(source))] == [b"pass\n", b"x = 1\n"]
    assert refusal(*names).startswith("empty.py: empty")
