"""Why a strategy is what it is: neighbours are legal and one change away, and what binds is found."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import code
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.explain import SETTINGS, explain, neighbours
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.table import DEGREES, Table
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload


def _asked(
    name: str = "llama-3-70b", fix: dict[str, Any] | None = None, **spread: float
) -> tuple[Figures, Question]:
    work = Workload(shape(name), 512, 8192)
    question = Question(workload=work, cluster=Cluster.named("h100x256"), fix=fix or {})
    return _figures(Table.of(work, question.cluster, question.profile, **spread)), question


def _figures(table: Table) -> Figures:
    return figures(table, estimate(table, Constants()))[0]


FULL = code("recompute", "full")
PIPED = {"shard": 8, "tensor_x": 8, "pipeline": 4, "zero": 1, "sequence_parallel": 1, "recompute": FULL}


def test_neighbours_are_one_change_away_and_use_all_devices() -> None:
    strategy, question = _asked(**PIPED)
    own = {name: strategy.strategy[name] for name in DEGREES}
    found = neighbours(strategy, question, Constants())
    assert len(found) > 15
    for one in found:
        product = 1
        for name in DEGREES:
            product *= int(one.figures.strategy[name])
        assert product == 256
        changed = [name for name in DEGREES if one.figures.strategy[name] != own[name]]
        assert len(changed) in (0, 2), one.change
    seconds = [one.figures.seconds for one in found]
    assert seconds == sorted(seconds)


def test_each_axis_and_each_setting_has_neighbours() -> None:
    strategy, question = _asked(**PIPED)
    changes = " | ".join(one.change for one in neighbours(strategy, question, Constants()))
    for words in (
        "tensor_x 8 → 4",
        "tensor_x 8 → 16",
        "pipeline 4 → 8",
        "pipeline 4 → 2",
        "shard 8 → 16",
        "context",
    ):
        assert words in changes
    for words in (
        "micro 1 → 2",
        "zero 1 → 2",
        "zero 1 → 3",
        "1f1b → zb-h1",
        "recompute full → keep all",
        "on host",
    ):
        assert words in changes
    assert len(SETTINGS) == 11


def test_a_setting_that_loses_its_ground_follows() -> None:
    spread = {
        "shard": 64,
        "pipeline": 4,
        "zero": 1,
        "virtual": 2,
        "schedule": code("schedule", "interleaved"),
    }
    strategy, question = _asked(**{**spread, "shard": 128, "pipeline": 2})
    alone = [one for one in neighbours(strategy, question, Constants()) if "pipeline 2 → 1" in one.change]
    assert alone
    assert {one.figures.strategy["virtual"] for one in alone} == {1}


def test_what_is_fixed_stays() -> None:
    strategy, question = _asked(fix={"tensor_x": 8, "micro": 1}, **PIPED)
    found = neighbours(strategy, question, Constants())
    assert found
    assert {one.figures.strategy["tensor_x"] for one in found} == {8}
    assert {one.figures.strategy["micro"] for one in found} == {1}


def test_memory_binds_where_a_quicker_neighbour_does_not_fit() -> None:
    strategy, question = _asked(**PIPED, micro=8)
    why = explain(strategy, question, Constants())
    quicker = [one for one in why.changes if not one.figures.fits]
    assert quicker
    assert why.sentences[0].startswith("memory binds: ")
    assert why.sentences[0].count("estimated") == 1


def test_memory_does_not_bind_where_all_fits() -> None:
    strategy, question = _asked("llama-3.2-1b", shard=256, zero=1)
    why = explain(strategy, question, Constants())
    assert all(one.figures.fits for one in why.changes)
    assert why.sentences[0].startswith("memory does not bind")


def test_sheets_add_up_to_the_step_and_the_peak() -> None:
    strategy, question = _asked(**PIPED)
    sheets = {sheet.title: sheet for sheet in explain(strategy, question, Constants()).sheets}
    shares = [float(row[3].rstrip("%")) for row in sheets["where the step goes"].rows]
    assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=0.5)
    memory = next(sheet for title, sheet in sheets.items() if "memory" in title)
    shares = [float(row[2].rstrip("%")) for row in memory.rows]
    assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=1.0)


def test_what_it_waits_for_is_what_saves_most() -> None:
    strategy, question = _asked(**PIPED)
    eased = explain(strategy, question, Constants()).eased
    assert eased[0].what == "arithmetic"
    slow = _figures(strategy.row.replaced(network_rate=1e8, node_rate=1e8, supernode_rate=1e8))
    assert explain(slow, question, Constants()).eased[0].what.startswith("links within a node")
