"""An answer says which published runs it rests on, and its interval is wider where there are few of its kind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fit_constants.published_runs import RECIPES, RUNS, TRANSCRIBED, evidence
from fit_constants.residuals import collected

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner import error_interval
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.error_interval import Runs, between, published, support, widening
from hyper_parallel.planner.framework_profiles import GENERIC
from hyper_parallel.planner.page import page_of
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.solve import solve
from hyper_parallel.planner.table import Table
from hyper_parallel.planner.training import answer_of
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload

DENSE = Runs("A", "dense", "hopper", "16 bits", 10, 64.0, 4096.0)
THREE = [replace(DENSE, source=name) for name in "ABC"]


def table(model: str = "llama-3-8b", cluster: str = "h100", sequence: int = 4096, **spread: Any) -> Table:
    work = Workload(shape(model), 256, sequence, spread.pop("precision", "bf16"))
    return Table.of(
        work, Cluster.named(f"{cluster}x64"), GENERIC, devices=spread.pop("devices", 64.0), **spread
    )


def test_three_sources_of_a_kind_do_not_widen() -> None:
    found = support(table(), THREE)
    assert found.wider == 1.0
    assert found.sentence == (
        "rests on 30 published runs of models without experts, 30 of them on Hopper; 30 of any model are in 16 bits"
    )


@pytest.mark.parametrize(
    ("sources", "wider"), [("", 2.0), ("A", math.sqrt(2)), ("AB", math.sqrt(1.5)), ("ABC", 1.0)]
)
def test_fewer_sources_widen_more(sources: str, wider: float) -> None:
    assert support(table(), [one for one in THREE if one.source in sources]).wider == pytest.approx(wider)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"model": "qwen3-30b-a3b"}, "no published run of mixtures of experts: interval widened 2 times"),
        (
            {"cluster": "b200"},
            "no published run of models without experts on Blackwell: interval widened 2 times",
        ),
        ({"precision": "fp8"}, "no published run of any model in FP8: interval widened 2 times"),
        (
            {"devices": 512.0},
            "no published run of models without experts on 128 devices or more: interval widened 2 times",
        ),
        (
            {"sequence": 32768},
            "no published run of models without experts of 8,192 tokens a sequence or more: interval widened 2 times",
        ),
    ],
)
def test_each_aspect_of_a_kind_may_lack_runs(asked: dict[str, Any], sentence: str) -> None:
    found = support(table(**asked), THREE)
    assert found.wider == 2.0
    assert found.sentence == sentence


def test_near_runs_count() -> None:
    """Four times the devices or the tokens of a published run are near it."""
    assert support(table(devices=256.0, sequence=16384), THREE).wider == 1.0


def test_a_row_does_not_count_for_itself() -> None:
    t = table(micro=np.array([1.0, 2.0]))
    assert widening(t, THREE[:2], np.array(["A", "Z"])).tolist() == pytest.approx(
        [math.sqrt(2), math.sqrt(1.5)]
    )


def test_the_interval_is_wider_in_its_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    t = table()
    told = estimate(t, Constants())

    def halves(runs: list[Runs]) -> tuple[float, float]:
        monkeypatch.setattr(error_interval, "published", lambda: runs)
        low, high = between(t, told)
        return float(np.log(told.seconds / low)[0]), float(np.log(high / told.seconds)[0])

    few, many = halves([]), halves(THREE)
    assert min(many) > 0
    assert few == pytest.approx([2 * side for side in many])


def test_what_is_kept_is_what_is_published() -> None:
    """The list beside the constants is that of the published runs."""
    runs = evidence(RUNS, RECIPES, TRANSCRIBED)
    assert tuple(collected(runs.table.take(runs.timed), runs.sources[runs.timed])) == published()
    assert sum(one.rows for one in published()) == runs.timed.sum()


def test_an_answer_says_what_it_rests_on() -> None:
    question = Question(
        workload=Workload(shape("qwen3-30b-a3b"), 64, 4096), cluster=Cluster.named("910bx8"), devices=8
    )
    one = solve(question, fitted())
    answer, rests_on = answer_of(one), support(one.best[0].row)
    sentence = rests_on.sentence
    assert "mixtures of experts on Ascend" in sentence and "interval widened" in sentence
    assert rests_on.wider > 1
    assert sentence in answer.text()
    assert answer.to_json()["evidence"]["sentence"] == sentence
    assert answer.to_json()["evidence"]["wider"] == rests_on.wider
    assert sentence in page_of(answer, one, one.best).html()
