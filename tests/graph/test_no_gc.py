"""Garbage is searched for again when a plan is made, whatever came of it."""

from __future__ import annotations

import gc

import pytest

from hyper_parallel.graph.capture_overrides import collect_between, uncollected


@uncollected()
def _collecting(fails: bool = False) -> bool:
    if fails:
        raise ValueError("no plan")
    return gc.isenabled()


def test_the_collector_rests_meanwhile_only() -> None:
    assert gc.isenabled()
    assert not _collecting()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no plan"):
        _collecting(fails=True)
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        assert not _collecting()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_large_steps_leave_is_freed_where_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gc, "collect", lambda: asked.append(gc.isenabled()))
    collect_between()
    with uncollected():
        collect_between()
    assert asked == [False]
