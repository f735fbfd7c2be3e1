"""Ranks that are not there."""

from __future__ import annotations

import sys

from hyper_parallel.compat.fake_tensors import fake_ranks


def test_they_leave_the_interpreter_as_it_was() -> None:
    before = sys.excepthook
    with fake_ranks(4, 0):
        pass
    assert sys.excepthook is before
