"""What the planner found goes through the real step, or says why it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.overlap import order_search
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.metrics import figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.refine import refine
from hyper_parallel.planner.run_file import PlannedRunFile, planned_run_file
from hyper_parallel.planner.table import Table
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

TINY = Shape("tiny", 2, 64, 4, 2, 16, ffn=128, gated=True, vocabulary=512, positions=128)


def _written(**spread: float) -> PlannedRunFile:
    question = Question(workload=Workload(TINY, 4, 128), cluster=Cluster.named("h100x2"))
    table = Table.of(question.workload, question.cluster, question.profile, **spread)
    return planned_run_file(figures(table, estimate(table, Constants()))[0], question)


def test_a_pipeline_is_predicted_by_its_stages() -> None:
    said: list[str] = []
    found = refine([_written(pipeline=2)], Cluster.named("h100x2"), said.append)
    assert found[0].seconds is not None and found[0].seconds > 0
    assert not found[0].reason
    assert said[0] == "capturing and simulating its step"


def test_what_cannot_be_says_why() -> None:
    file = _written(shard=2, zero=3)
    wrong = replace(file, data={**file.data, "train": {"batch": 3, "micro_batch": 1}})
    found = refine([wrong], Cluster.named("h100x2"), lambda _: None)
    assert found[0].seconds is None
    assert "'train.batch' (3) must be a multiple" in found[0].reason


def test_a_step_above_the_limit_is_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what it is then found to hold in the order of the model's code; within the limit nothing changes."""
    file, cluster, said = _written(shard=2, zero=3, micro=1), Cluster.named("h100x2"), []
    (free,) = refine([file], cluster, said.append)
    (within,) = refine([file], cluster, said.append, limit=1e12)
    assert free.peak is not None
    assert within == free
    monkeypatch.setattr(order_search, "overlap", _never)
    (above,) = refine([file], cluster, said.append, limit=free.peak / 4)
    assert above.seconds is None
    assert above.fits is False
    assert above.peak is not None
    assert free.peak / 2 < above.peak < 2 * free.peak
    assert "was not simulated" in above.reason


def _never(*given: object, **named: object) -> None:
    raise AssertionError("ordered")


@pytest.mark.matrix
def test_a_step_is_simulated() -> None:
    found = refine([_written(shard=2, zero=3, micro=2)], Cluster.named("h100x2"), lambda _: None)
    assert found[0].seconds is not None
    assert found[0].seconds > 0
    assert found[0].peak is not None
    assert found[0].peak > 2 * TINY.parameters
