"""Samples of the campaigns on budgets for loops of one's own: patterns, and the allocator as a witness."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import budget_allocator
import pytest
import user_loops
from allocations import compiled
from processes import fresh

from harness import loop_patterns


@pytest.fixture(autouse=True)
def _quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("hyper_parallel.offloading.schedule.solve"), "WORK", 0)
    monkeypatch.setattr(
        importlib.import_module("hyper_parallel.offloading.schedule.graph_search"), "PLANS", 1
    )


@pytest.mark.parametrize(
    ("name", "came"),
    [
        ("checkpoint, dropout, autocast", {"came": "equal", "tight": "equal"}),
        ("resumed optimizer", {"came": "equal", "tight": "equal"}),
        ("adapters, checkpoint, autocast", {"came": "equal", "tight": "equal"}),
        ("hooks of every kind", {"came": "equal"}),
        ("layers left out by Python", {"came": "refused"}),
    ],
)
def test_patterns(name: str, came: dict[str, str]) -> None:
    found = loop_patterns.run(name)
    assert {key: found.get(key) for key in came} == came, found


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_the_allocator_gives_out_no_more_than_the_budget(world: int, tmp_path: Path) -> None:
    [row] = budget_allocator.rows_of(world, [3], compiled(tmp_path))
    assert budget_allocator.above(row) <= 0, row
    broken: dict[str, Any] = {
        **row,
        "workers": [{**row["workers"][0], "budget": row["workers"][0]["peak"] - 1}],
    }
    assert budget_allocator.above(broken) == 1
    assert budget_allocator.summarized([broken], 1)["workers"][str(world)]["above"] == [3]


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_pattern_of_user_loops_is_right_within_three_budgets(tmp_path: Path) -> None:
    rows = fresh(user_loops.cells, [2], LD_PRELOAD=str(compiled(tmp_path)))
    assert [row["came"] for row in rows] == ["right"] * 3, rows
    assert all(row["peak"] <= row["budget"] for row in rows)
