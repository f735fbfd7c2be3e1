"""Something lies on the host only where it pays, or where nothing fits without; and the answer says which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner import host_memory, refine
from hyper_parallel.planner.constants import constants_for
from hyper_parallel.planner.format import ON_HOST
from hyper_parallel.planner.framework_profiles import HYPER_PARALLEL
from hyper_parallel.planner.host_memory import LEAST, paying
from hyper_parallel.planner.metrics import Simulated
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import PlannedRunFile
from hyper_parallel.planner.search import search
from hyper_parallel.planner.solve import Solved
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload


def _question(model: str, cluster: str, **fix: float) -> Question:
    return Question(
        workload=Workload(shape(model), 64, 4096),
        cluster=Cluster.named(cluster),
        profile=HYPER_PARALLEL,
        runnable=True,
        fix=fix,
        top=2,
    )


def _seconds(question: Question) -> float | None:
    found = search(question, constants_for(question.profile, question.cluster))
    return found.best[0].seconds if found.best else None


def _solved(monkeypatch: pytest.MonkeyPatch, question: Question) -> Solved:
    """The answer by closed forms alone; the simulator says that it fits."""
    monkeypatch.setattr(refine, "engine_profile", lambda asked, *_: asked.profile)

    def refined(files: Sequence[PlannedRunFile], *_: object) -> list[Simulated]:
        return [Simulated(1.0, True, 1.0) for _ in files]

    monkeypatch.setattr(refine, "refine", refined)
    return refine.solved(question, 1)


def test_where_only_the_host_makes_it_fit_each_kind_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = _question("qwen-3-14b", "rtx4090x8")
    assert _seconds(_question("qwen-3-14b", "rtx4090x8", **dict.fromkeys(ON_HOST, 0.0))) is None
    assert _seconds(_question("qwen-3-14b", "rtx4090x8", state_on_host=0.0)) is None
    found = _solved(monkeypatch, question)
    best = found.best[found.chosen]
    moved = {column for column in ON_HOST if best.strategy[column]}
    assert moved == {"state_on_host", "activations_on_host"}
    state, activations = found.notes[-2:]
    assert state.startswith(
        "optimizer state on the host: nothing fits without (the smallest is estimated at "
    )
    without = _seconds(_question("qwen-3-14b", "rtx4090x8", activations_on_host=0.0))
    assert without is not None and best.seconds < (1 - LEAST) * without
    gain = f"{1 - best.seconds / without:.0%}"
    assert activations == f"activations on the host: saves {gain} of the best step without, by estimate"


@pytest.mark.parametrize(("model", "cluster"), [("llama-3-70b", "h100x8"), ("qwen-3-8b", "rtx4090x8")])
def test_a_kind_that_does_not_pay_stays_on_the_devices(model: str, cluster: str) -> None:
    """What is left moved saves 2% beside the best without it, and what is not would not."""
    question = _question(model, cluster)
    known = constants_for(question.profile, question.cluster)
    narrowed, best, moved = paying(question, known)
    assert best is not None and best.seconds == _seconds(narrowed)
    assert {one.column for one in moved} == {column for column in ON_HOST if best.strategy[column]}
    for one in moved:
        without = _seconds(_question(model, cluster, **{**narrowed.fix, one.column: 0.0}))
        assert one.gain == (None if without is None else 1 - best.seconds / without)
        assert one.gain is None or one.gain >= LEAST
    for column in narrowed.fix:
        fewer = {name: value for name, value in narrowed.fix.items() if name != column}
        quickest = _seconds(_question(model, cluster, **fewer))
        assert quickest is not None and quickest > (1 - LEAST) * best.seconds


def test_what_pays_is_a_note_where_it_fits_without(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _solved(monkeypatch, _question("qwen-3-8b", "rtx4090x8"))
    assert not any(found.best[found.chosen].strategy[column] for column in ON_HOST)
    note = next(one for one in found.notes if "is estimated to take" in one)
    _, best, moved = paying(
        _question("qwen-3-8b", "rtx4090x8"), constants_for(HYPER_PARALLEL, found.question.cluster)
    )
    assert best is not None and moved
    assert f"{1 - best.seconds / found.best[0].seconds:.0%} less (beside the best without: " in note
    for one in moved:
        assert f"{one.name} {one.gain:.0%}" in note
        assert f"--fix {one.column}={best.strategy[one.column]}" in note


def test_where_it_does_not_pay_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _solved(monkeypatch, _question("llama-3-8b", "h100x8"))
    assert not any("host" in note for note in found.notes)
    # A gain of 2% is the least that is told of.
    monkeypatch.setattr(host_memory, "LEAST", 1.0)
    monkeypatch.setattr(refine, "PAYS", 1.0)
    assert not any("host" in note for note in _solved(monkeypatch, _question("qwen-3-8b", "rtx4090x8")).notes)


def test_a_kind_that_the_user_moves_is_named_with_its_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    fix: dict[str, Any] = {"state_on_host": 1.0, "activations_on_host": 0.0, "weights_on_host": 0.0}
    found = _solved(monkeypatch, _question("qwen-3-8b", "rtx4090x8", **fix))
    without = _seconds(_question("qwen-3-8b", "rtx4090x8", **dict.fromkeys(ON_HOST, 0.0)))
    assert without is not None
    gain = f"{1 - found.best[0].seconds / without:.0%}"
    assert (
        found.notes[-1] == f"optimizer state on the host: saves {gain} of the best step without, by estimate"
    )
