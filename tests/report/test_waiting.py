"""Waits: what a terminal is shown, and what a pipe gets."""

from __future__ import annotations

import io
import time

import pytest

from hyper_parallel.report import wait_line as module
from hyper_parallel.report.wait_line import announcing, note_progress, waiting


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHOWN_S", 0.01)
    monkeypatch.setattr(module, "PLAIN_S", 0.05)
    monkeypatch.setattr(module, "_REFRESH_S", 0.01)


def test_a_terminal_counts_seconds_and_is_cleared() -> None:
    with announcing(screen := _Terminal()), waiting("capturing the step"):
        time.sleep(0.1)
    assert "capturing the step … 0 s" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_a_pipe_gets_one_plain_line() -> None:
    with announcing(pipe := io.StringIO()), waiting("capturing the step"), waiting("a part of it"):
        time.sleep(0.2)
    assert pipe.getvalue() == "capturing the step …\n"


def test_a_short_wait_and_one_that_nobody_announces_show_nothing() -> None:
    with announcing(pipe := io.StringIO()), waiting("capturing the step"):
        pass
    with waiting("nobody hears"):
        time.sleep(0.1)
    assert pipe.getvalue() == ""


def test_a_wait_ends_with_its_error() -> None:
    with announcing(screen := _Terminal()):
        with pytest.raises(ZeroDivisionError), waiting("capturing"):
            1 / 0
        with waiting("the next"):
            time.sleep(0.05)
    assert "the next … 0 s" in screen.getvalue()


def test_a_wait_shows_what_of_it_is_under_way_until_it_ends() -> None:
    with announcing(screen := _Terminal()):
        with waiting("planning"):
            note_progress("about 9 s left")
            time.sleep(0.1)
        with waiting("the next"):
            time.sleep(0.1)
    assert "planning … 0 s; about 9 s left" in screen.getvalue()
    assert "the next … 0 s; about" not in screen.getvalue()
    note_progress("nobody waits")
    with announcing(pipe := io.StringIO()), waiting("planning"):
        note_progress("about 9 s left")
    assert pipe.getvalue() == "about 9 s left\n"
