"""The progress of a run on every kind of stream: wide and narrow terminals (pseudo-terminals), pipes, closed ones."""
import fcntl
import os
import pty
import re
import select
import struct
import termios

import pytest

from runtime.progress import Progress


@pytest.fixture
def terminal(monkeypatch):
    """`terminal(columns)`: a stream to a terminal, and what reads all that was shown on it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    opened = []

    def make(columns):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        stream = os.fdopen(slave, "w", encoding="utf-8")
        opened.extend([stream, os.fdopen(master, "rb", buffering=0)])

        def shown():
            stream.flush()
            text = b""
            # what was written comes through in a moment, in pieces
            while select.select([master], [], [], 0.1)[0]:
                text += os.read(master, 1 << 16)
            return text.decode()
        return stream, shown
    yield make
    for f in opened:
        f.close()


def train(progress, steps):
    for step in steps:
        progress.update(step, None if step == 2 else 10.0 / step, 123456.7)
        if step == 3:
            progress.note("validation loss 3.21")
    progress.close()


def test_a_wide_terminal_gets_a_bar_with_loss_rate_and_time_left(terminal):
    stream, shown = terminal(100)
    train(Progress(20, stream), range(1, 21))
    text = shown()
    assert "20/20" in text and "loss 0.5000, 123k tok/s" in text and "left" in text and "|" in text
    assert re.search(r"\r *\rvalidation loss 3\.21\r\n", text), "a note stands on a line of its own"
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= 100


def test_a_resumed_run_begins_where_the_other_ended(terminal):
    stream, shown = terminal(100)
    train(Progress(20, stream, start=10), range(11, 21))
    assert "10/20" in (text := shown()) and "20/20" in text


@pytest.mark.parametrize("columns", [20, 40, 59])
def test_LOG6_a_narrow_terminal_gets_lines_that_do_not_wrap(terminal, columns):
    stream, shown = terminal(columns)
    train(Progress(20000, stream, interval_s=0.0), range(19980, 20001))
    text = shown()
    # no carriage return but those of line ends, no cursor movement
    assert "\x1b" not in text and "\r" not in text.replace("\r\n", "")
    lines = text.split("\r\n")
    assert max(map(len, lines)) < columns
    assert any("20000/20000" in line for line in lines)
    assert columns < 40 or "loss 0.0005" in text and "left" in text


@pytest.mark.parametrize("no_color", ["", "1"])
@pytest.mark.parametrize("columns", [40, 100])
def test_LOG6_no_colours(terminal, monkeypatch, columns, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    stream, shown = terminal(columns)
    train(Progress(5, stream), range(1, 6))
    # colours end in m; the bar may move the cursor
    assert not re.search(r"\x1b\[[0-9;]*m", shown())


def test_LOG6_a_pipe_gets_plain_lines_the_first_and_the_last_among_them(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with open(tmp_path / "out", "w") as stream:
        train(Progress(50, stream, interval_s=3600.0), range(1, 51))
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0].startswith("step 1/50, loss 10.0000, ? left, 123k tok/s")
    assert lines[1] == "validation loss 3.21"
    assert re.fullmatch(r"step 50/50, loss 0\.2000, 00:00 left, 123k tok/s", lines[2]) and len(lines) == 3


def test_a_step_without_a_loss_says_so(tmp_path):
    with open(tmp_path / "out", "w") as stream:
        train(Progress(2, stream), [2])
    assert "no loss" in (tmp_path / "out").read_text()


def test_a_pipe_that_is_closed_does_not_stop_the_run_nor_fail_at_exit():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        train(Progress(50, stream, interval_s=0.0), range(1, 51))


def test_a_terminal_that_hangs_up_does_not_stop_the_run_nor_fail_at_exit():
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with os.fdopen(slave, "w") as stream:
        progress = Progress(5, stream)
        progress.update(1, 1.0, 1.0)
        os.close(master)
        train(progress, range(2, 6))
