"""What is kept, computed again or moved: each group's best way is the best of all its ways."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.planner.columns import Array, Columns, taken
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.framework_profiles import GENERIC
from hyper_parallel.planner.memory_choices import MemoryChoice
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.space import StrategySpace
from hyper_parallel.planner.table import SPREAD
from planner.plan_cases import DENSE, base, groups, question

K = Constants()
DEEP = replace(DENSE, layers=13)
HEAVY = replace(DENSE, hidden=1024, ffn=2048, layers=5, vocabulary=256000)
FEW = {
    "schedule": ("1f1b", "interleaved"),
    "virtual": (1, 2),
    "order": (0, 4),
    "state_on_host": (0, 0.5, 1),
    "activations_on_host": (0, 0.25),
}
CASES = [
    pytest.param(question(DEEP, gib=9.0, devices=4, fix=FEW), id="tight"),
    pytest.param(
        question(DEEP, gib=16.0, devices=4, fix={**FEW, "recomputed": (0.25, 0.5, 1.0)}), id="shares"
    ),
    # So slow that steps wait for copies, and that more recompute hides more of the gradients' reduction.
    pytest.param(
        question(DEEP, gib=14.0, slower=100, devices=4, fix={**FEW, "zero": (0, 1)}), id="slow links"
    ),
    pytest.param(
        question(DEEP, gib=14.0, slower=30, host_gib=4.0, devices=4, fix={**FEW, "zero": (0, 1)}),
        id="small host",
    ),
    # Longer layers may be cut more evenly.
    pytest.param(
        question(
            HEAVY,
            gib=20.0,
            devices=4,
            profile=replace(GENERIC, balanced=1.0),
            fix={**FEW, "pipeline": (2, 4)},
        ),
        id="cut by cost",
    ),
]


def _some(asked: Question, n: int = 120) -> Columns:
    rows = groups(asked)
    return taken(rows, np.random.default_rng(1).integers(0, rows["micro"].size, n))


def _best(asked: Question, rows: Columns) -> tuple[Array, Array]:
    """Seconds of each row's fastest way that fits, and bytes of its smallest; of all ways."""
    n = rows["micro"].size
    seconds, bytes = np.full(n, np.inf), np.full(n, np.inf)
    for ways in StrategySpace(asked).kept({**rows, "row": np.arange(n, dtype=np.float64)}):
        seen = estimate(base(asked).replaced(**{name: ways[name] for name in SPREAD}), K)
        at = ways["row"].astype(int)
        np.minimum.at(seconds, at, np.where(seen.fits, seen.seconds, np.inf))
        np.minimum.at(bytes, at, np.where(seen.fits, seen.peak, np.inf))
    return seconds, bytes


@pytest.mark.parametrize("asked", CASES)
def test_each_group_has_its_fastest_way(asked: Question) -> None:
    rows = _some(asked)
    kept = MemoryChoice(StrategySpace(asked), base(asked), K)
    seconds, _ = _best(asked, rows)
    found = kept.fastest(rows, np.zeros(seconds.size), np.full(seconds.size, np.inf))
    assert found.seconds == pytest.approx(seconds, rel=1e-12)
    assert np.isfinite(seconds).any()
    # Some groups fit only with recompute, or with something on the host.
    fine = np.isfinite(seconds)
    assert np.any(found.rows["recompute"][fine] == 2)
    assert np.any(found.rows["state_on_host"][fine] > 0)


@pytest.mark.parametrize("asked", CASES)
def test_with_a_limit_what_is_below_it_is_found(asked: Question) -> None:
    rows = _some(asked)
    seconds, _ = _best(asked, rows)
    limit = float(np.median(seconds[np.isfinite(seconds)]))
    found = MemoryChoice(StrategySpace(asked), base(asked), K).fastest(
        rows, np.zeros(seconds.size), np.full(seconds.size, limit)
    )
    below = seconds < limit
    assert found.seconds[below] == pytest.approx(seconds[below], rel=1e-12)
    assert np.all(found.seconds[~below] >= limit)


@pytest.mark.parametrize("asked", CASES)
def test_each_group_has_its_smallest_way(asked: Question) -> None:
    rows = _some(asked)
    _, bytes = _best(asked, rows)
    found = MemoryChoice(StrategySpace(asked), base(asked), K).smallest(rows)
    held = np.isfinite(bytes)
    assert found.bytes[held] == pytest.approx(bytes[held], rel=1e-12)


def test_a_way_is_what_its_columns_say() -> None:
    asked = CASES[0].values[0]
    assert isinstance(asked, Question)
    rows = _some(asked)
    found = MemoryChoice(StrategySpace(asked), base(asked), K).fastest(
        rows, np.zeros(120), np.full(120, np.inf)
    )
    fine = np.isfinite(found.seconds)
    seen = estimate(base(asked).replaced(**{name: found.rows[name][fine] for name in SPREAD}), K)
    assert found.seconds[fine] == pytest.approx(seen.seconds)
    assert found.bytes[fine] == pytest.approx(seen.peak)
    assert np.all(seen.fits)
