"""What is simulated until a strategy fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner import refine
from hyper_parallel.planner.constants import constants_for
from hyper_parallel.planner.framework_profiles import HYPER_PARALLEL
from hyper_parallel.planner.metrics import Simulated
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import PlannedRunFile
from hyper_parallel.planner.solve import NothingFitsError
from hyper_parallel.planner.training import answer_of
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload


@pytest.fixture(autouse=True)
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed forms alone."""
    monkeypatch.setattr(refine, "engine_profile", lambda question, *_: question.profile)


def _question(**options: Any) -> Question:
    work = Workload(shape("llama-3-8b"), 64, 4096)
    return Question(workload=work, cluster=Cluster.named("h100x8"), profile=HYPER_PARALLEL, top=2, **options)


def _simulated(monkeypatch: pytest.MonkeyPatch, *fits: bool) -> list[PlannedRunFile]:
    """Lets the simulator say 100 GiB where a round's strategy does not fit; the files that it was asked about."""
    asked: list[PlannedRunFile] = []

    def refined(files: Sequence[PlannedRunFile], *_: object) -> list[Simulated]:
        asked.extend(files)
        fine = fits[len(asked) - 1]
        return [Simulated(1.0, fine, (50.0 if fine else 100.0) * 2**30)]

    monkeypatch.setattr(refine, "refine", refined)
    return asked


def test_a_runnable_strategy_that_does_not_fit_when_simulated_is_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = _simulated(monkeypatch, False, True)
    told = refine.solved(_question(runnable=True), 1, lambda _: None)
    assert len(asked) == 2 and told.simulated[0].fits
    assert told.files[told.chosen].data == asked[1].data != asked[0].data


def test_what_never_fits_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _simulated(monkeypatch, *[False] * (2 * refine.ROUNDS))
    with pytest.raises(NothingFitsError) as raised:
        refine.solved(_question(runnable=True), 1, lambda _: None)
    assert "what would make it fit" in str(raised.value) and "\n" not in str(raised.value)


def test_one_like_a_quicker_one_that_does_not_fit_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second best fits and takes 100 s; planned again with what the best was over, one takes its estimate."""
    asked: list[PlannedRunFile] = []

    def refined(files: Sequence[PlannedRunFile], *_: object) -> list[Simulated]:
        asked.extend(files)
        seconds, fine = ((1.0, False), (100.0, True), (0.5, True))[len(asked) - 1]
        return [Simulated(seconds, fine, (50.0 if fine else 100.0) * 2**30)]

    monkeypatch.setattr(refine, "refine", refined)
    found = refine.solved(_question(runnable=True), 2, lambda _: None)
    assert len(asked) == 3 and found.shown.seconds == 0.5
    assert found.files[found.chosen].data == asked[2].data != asked[0].data


def test_a_first_answer_stays_where_planning_again_finds_none_that_is_quicker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[PlannedRunFile] = []

    def refined(files: Sequence[PlannedRunFile], *_: object) -> list[Simulated]:
        asked.extend(files)
        fine = len(asked) != 1
        return [Simulated(100.0 + len(asked), fine, (50.0 if fine else 100.0) * 2**30)]

    monkeypatch.setattr(refine, "refine", refined)
    found = refine.solved(_question(runnable=True), 2, lambda _: None)
    assert len(asked) == 4 and found.shown.seconds == 102.0
    assert found.files[found.chosen].data == asked[1].data


def test_other_questions_are_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _simulated(monkeypatch, False)
    assert refine.solved(_question(), 1, lambda _: None).simulated[0].fits is False and len(asked) == 1


def test_others_are_simulated_while_one_may_be_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes twice its estimate, so that the second may be quicker; after that none is."""
    asked: list[PlannedRunFile] = []

    def refined(files: Sequence[PlannedRunFile], *_: object) -> list[Simulated]:
        asked.extend(files)
        return [Simulated((100.0, 1.0)[len(asked) - 1], True, 50.0 * 2**30)]

    monkeypatch.setattr(refine, "refine", refined)
    found = refine.solved(replace(_question(runnable=True), top=5), 3, lambda _: None)
    assert len(asked) == 2 and found.chosen == 1
    shown = found.shown
    assert shown.seconds == 1.0 and shown.peak == 50.0 * 2**30
    assert shown.between[0] < 1.0 < shown.between[1]
    assert "Simulated: a step in 1.00 s" in answer_of(found).file().text  # type: ignore[misc]
    # Reasons, and figures as data, are those of what is answered.
    data = answer_of(found).to_json()
    assert data["chosen"] == 1 and data["answer"]["step_time_s"] == 1.0 and "parts_s" not in data["answer"]
    known = constants_for(HYPER_PARALLEL, found.question.cluster)
    assert found.why.to_json() == refine.explain(found.best[1], found.question, known).to_json()
