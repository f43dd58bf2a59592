"""A line on stderr after a while, and none before."""

import io
import threading
import time
from typing import cast

import pytest

from stepmark.cases.record import AnyCase
from stepmark.ground import waiting
from stepmark.ground.waiting import Waiting
from stepmark.measuring import progress
from stepmark.measuring.progress import Progress


class Stream(io.StringIO):
    """A stderr that is a terminal or not, and that tells when it is written to."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal, self.written = is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def stream_of(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> Stream:
    """Replace stderr; called by tests themselves, as pytest replaces it before they begin."""
    stream = Stream(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(waiting, "_PATIENCE_S", 0.05)
    monkeypatch.setenv("TERM", "xterm")
    return stream


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_short_wait_is_silent(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    stream = stream_of(monkeypatch, is_terminal=is_terminal)
    with Waiting("reading"):
        pass
    time.sleep(0.1)
    assert stream.getvalue() == ""


def test_a_file_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(monkeypatch, is_terminal=False)
    with Waiting("reading 3 traces"):
        assert stream.written.wait(10)
        time.sleep(0.1)
    assert stream.getvalue() == "# reading 3 traces ...\n"


def test_a_file_gets_progress_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(monkeypatch, is_terminal=False)
    for name in ("_FIRST_PAUSE_OF_FILE_S", "_PAUSE_OF_FILE_S"):
        monkeypatch.setattr(waiting, name, 0.05)
    with Waiting("reading") as own:
        own.progress = "1 of 3"
        assert stream.written.wait(10)
        own.progress = "2 of 3"
        stream.written.clear()
        assert stream.written.wait(10)
        assert stream.written.wait(10)
    first, *_, last = stream.getvalue().splitlines()
    assert (first, last) == ("# reading, 1 of 3 ...", "# reading, 2 of 3 ...")


def test_a_terminal_shows_seconds_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(monkeypatch, is_terminal=True)
    with Waiting("reading"):
        assert stream.written.wait(10)
    text = stream.getvalue()
    assert text.startswith("\rreading: 0 s")
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


def test_other_ranks_of_a_launcher_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    stream = stream_of(monkeypatch, is_terminal=False)
    with Waiting("reading"):
        time.sleep(0.2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("quiet", "text"), [(False, "# [1/2] measuring gemm ...\n"), (True, "")]
)
def test_a_long_case_is_named(monkeypatch: pytest.MonkeyPatch, quiet: bool, text: str) -> None:
    stream = stream_of(monkeypatch, is_terminal=False)
    monkeypatch.setattr(progress, "case_text", lambda case: "gemm")
    sink = Progress(2, None, quiet=quiet)
    sink.begin(cast(AnyCase, object()))
    stream.written.wait(0.5)
    sink.close()
    assert stream.getvalue() == text


def test_a_wait_within_another_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(monkeypatch, is_terminal=False)
    with Waiting("predicting 2 combinations"), Waiting("reading"):
        assert stream.written.wait(10)
        time.sleep(0.1)
    assert stream.getvalue() == "# predicting 2 combinations ...\n"
