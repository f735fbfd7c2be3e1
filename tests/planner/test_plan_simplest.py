"""Of strategies that tie the simplest comes first, as listing all finds it, and each of its axes pays for itself."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import SearchResult, search, within
from hyper_parallel.planner.solve import AXES, TIE, simplest, solve
from hyper_parallel.planner.table import SPREAD
from hyper_parallel.planner.training import answer_of
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload
from planner.plan_cases import EXPERTS, listed, question

K = Constants()
SMALL = {"state_on_host": (0.0, 1.0), "activations_on_host": (0.0, 0.5), "micro": (1, 2)}
CASES = {
    "roomy": question(gib=80.0, fix=SMALL),
    "tight": question(gib=14.0, fix=SMALL),
    "tighter": question(gib=7.5, fix=SMALL),
    "experts": question(EXPERTS, gib=16.0, devices=4, fix=SMALL),
    "runnable": question(gib=14.0, runnable=True),
    "fixed axis": question(gib=14.0, fix={**SMALL, "context": 2}),
}


@functools.cache
def _points(case: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """All points that fit: columns, and seconds of a step."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in SPREAD}
    seconds = []
    for table in listed(CASES[case]):
        seen = estimate(table, K)
        fits = np.broadcast_to(seen.fits, table.n)
        seconds.append(np.broadcast_to(seen.seconds, table.n)[fits])
        for name in SPREAD:
            columns[name].append(np.broadcast_to(getattr(table, name), table.n)[fits])
    return {name: np.concatenate(some) for name, some in columns.items()}, np.concatenate(seconds)


@functools.cache
def _found(case: str, tie: float = 0.0) -> SearchResult:
    return search(CASES[case], K, tie)


@functools.cache
def _simplest(case: str, tie: float) -> SearchResult:
    return simplest(replace(CASES[case], tie=tie), K)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tie", [TIE, 0.2])
def test_ties_are_those_of_listing_all(case: str, tie: float) -> None:
    columns, seconds = _points(case)
    found = _found(case, tie)
    near = seconds <= seconds.min() * (1 + tie)
    data = columns["replicate"] * columns["shard"]
    kinds = np.stack([data, *(columns[axis] for axis in AXES)])[:, near]
    assert len(found.ties) == len(np.unique(kinds, axis=1).T)
    assert found.best[0].seconds == _found(case).best[0].seconds


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tie", [TIE, 0.2])
def test_no_axis_of_the_answer_could_go_within_the_tie(case: str, tie: float) -> None:
    columns, seconds = _points(case)
    found = _simplest(case, tie)
    first = found.best[0]
    assert found.quickest is not None
    assert found.quickest.seconds == pytest.approx(seconds.min(), rel=1e-9)
    degrees = {axis: float(getattr(first.row, axis)[0]) for axis in AXES}
    several = [axis for axis, degree in degrees.items() if degree > 1]
    for axis in several:
        if axis in CASES[case].fix:
            continue
        kept = [columns[other] == 1 for other in AXES if other not in several or other == axis]
        without = np.logical_and.reduce(kept)
        if axis == "tensor_x":  # a second tensor axis needs a first one
            without &= columns["tensor_y"] == 1
        assert not (seconds[without] <= first.seconds * (1 + tie) * (1 - 1e-9)).any()
    fewest = sum((columns[axis] > 1).astype(int) for axis in AXES)[seconds <= seconds.min() * (1 + tie)]
    assert len(several) <= fewest.min()


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_moved_to_the_host_where_the_same_axes_tie_without(case: str) -> None:
    columns, seconds = _points(case)
    found = _simplest(case, TIE)
    assert found.quickest is not None
    first = found.best[0]
    same = np.logical_and.reduce([columns[axis] == float(getattr(first.row, axis)[0]) for axis in AXES])
    stays = (columns["state_on_host"] == 0) & (columns["activations_on_host"] == 0)
    most = max(first.seconds, found.quickest.seconds * (1 + TIE))
    possible = bool((seconds[same & stays] <= most * (1 - 1e-9)).any())
    chosen = first.strategy
    assert (chosen["state_on_host"] == 0 and chosen["activations_on_host"] == 0) == possible


def test_within_finds_the_quickest_or_nothing() -> None:
    asked, best = CASES["tight"], _found("tight").best[0]
    found = within(asked, K, best.seconds * 1.01)
    assert found is not None
    assert found.seconds == best.seconds
    assert within(asked, K, best.seconds * 0.99) is None


def test_llama_8b_on_64_devices_has_data_parallelism_alone() -> None:
    asked = Question(
        workload=Workload(shape("llama-3-8b"), 512, 8192), cluster=Cluster.named("h100x64"), tie=TIE
    )
    one = solve(asked)
    assert [one.best[0].strategy[axis] for axis in AXES] == [1] * len(AXES)
    assert one.best[0].strategy["state_on_host"] == 0
    answer = answer_of(one)
    (said,) = [sentence for sentence in answer.sentences if "count as equal" in sentence]
    assert f"{len(one.found.ties)} sets of axes tie" in said
    assert said in " ".join(answer.text().split())
    found: dict[str, Any] = answer.to_json()
    assert found["ties"]["quickest"]["step_time_s"] <= found["best"][0]["step_time_s"]
    assert one.found.gap <= TIE
    axes = [tuple(best.strategy[axis] for axis in ("replicate", "shard", *AXES)) for best in one.best]
    assert len(set(axes)) == len(axes)


def test_no_tie_is_asked_for() -> None:
    asked = question(gib=14.0, fix=SMALL)
    one = solve(asked, K)
    assert one.found.quickest is None
    answer = answer_of(one)
    assert dict(answer.lines)["ties"] == "not asked for: the quickest estimate comes first"
    assert not any("count as equal" in sentence for sentence in answer.sentences)
    assert answer.to_json()["ties"] is None


def test_a_tie_is_a_share() -> None:
    with pytest.raises(ConfigError, match="tie is a share of a step, 0 to 1; got 2"):
        question(gib=14.0, tie=2)


def test_an_axis_goes_whose_removal_costs_less_than_a_tie() -> None:
    # Context and tensor tie with the quickest; tensor alone is beyond that, and within a tie of both.
    work = Workload(shape("llama-3-70b"), 1024, 8192)
    asked = Question(workload=work, cluster=Cluster.named("h100x512"), tie=TIE)
    first = simplest(asked, fitted()).best[0]
    for axis in AXES:
        if getattr(first.row, axis)[0] > 1:
            others = {other: 1 for other in AXES if getattr(first.row, other)[0] == 1}
            limited = replace(asked, tie=0.0, fix={**others, axis: 1})
            assert within(limited, fitted(), first.seconds * (1 + TIE)) is None, axis
