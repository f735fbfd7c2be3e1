"""The search finds the model's optimum, its bounds are bounds, and its counts are those of listing every point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.plan.bounds import Bounds
from hyper_parallel.plan.constants import Constants
from hyper_parallel.plan.model.step import forecast
from hyper_parallel.plan.question import Question
from hyper_parallel.plan.search import answer
from hyper_parallel.plan.space import Columns, Space, taken
from hyper_parallel.plan.table import SPREAD, Table
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

DENSE = Shape("dense", 6, 2048, 16, 4, 128, ffn=8192, gated=True, vocabulary=64000)
EXPERTS = replace(
    DENSE, name="experts", layers=5, experts=8, chosen=2, expert_ffn=4096, shared_ffn=2048, dense_layers=1
)
K = Constants()


def _cluster(gib: float, host: float) -> Cluster:
    """Small nodes of devices with `gib` GiB, and `host` B/s to their host."""
    h100 = Cluster.named("h100")
    assert h100.device
    memory = replace(h100.device.memory, bytes=gib * 2**30)
    links = {**h100.links, "host": replace(h100.links["host"], bandwidth=host)}
    return replace(h100, node=4, device=replace(h100.device, memory=memory), links=links)


def _question(
    model: Shape = DENSE, gib: float = 80.0, devices: int = 8, host: float = 63e9, **options: Any
) -> Question:
    work = Workload(model, batch=16, sequence=4096)
    return Question(workload=work, cluster=_cluster(gib, host), devices=devices, **options)


def _base(question: Question) -> Table:
    return Table.of(question.workload, question.cluster, question.profile, devices=float(question.devices))


def _groups(question: Question) -> Iterator[Columns]:
    """All strategies that lack what is computed again and moved."""
    space = Space(question)
    rows = space.degrees()
    for level in (space.micro, space.dual, space.splits, space.orders, space.schedules):
        rows, _ = level.expand(rows)
    for start in range(0, rows["micro"].size, 20000):
        yield taken(rows, slice(start, start + 20000))


def _listed(question: Question) -> Iterator[Table]:
    """Every point of a space."""
    space, base = Space(question), _base(question)
    for rows in _groups(question):
        for ways in space.kept(rows):
            yield base.replaced(**{name: ways[name] for name in SPREAD})


SMALL = {"state_on_host": (0.0, 1.0), "activations_on_host": (0.0, 0.5), "micro": (1, 2)}
CASES = [
    pytest.param(_question(gib=80.0, fix=SMALL), id="roomy"),
    pytest.param(_question(gib=14.0, fix=SMALL), id="tight"),
    pytest.param(_question(gib=7.5, fix=SMALL), id="tighter"),
    pytest.param(
        _question(gib=9.0, host=3e8, devices=4, fix={**SMALL, "state_on_host": (0.5, 1.0), "zero": (0, 1)}),
        id="slow-host",
    ),
    pytest.param(_question(EXPERTS, gib=16.0, devices=4, fix=SMALL), id="experts"),
    pytest.param(_question(gib=14.0, objective="memory", fix=SMALL), id="memory"),
    pytest.param(
        _question(gib=20.0, fix={"recompute": "full", "recomputed": (0.5, 1.0)}, devices=4), id="fixed"
    ),
    pytest.param(_question(gib=14.0, runnable=True), id="runnable"),
]


@pytest.mark.parametrize("question", CASES)
def test_the_answer_is_the_best_of_all_points(question: Question) -> None:
    found = answer(question, K)
    best, counted = float("inf"), 0
    for table in _listed(question):
        seen = forecast(table, K)
        figure = seen.peak if question.objective == "memory" else seen.seconds
        counted += table.n
        best = min(best, float(np.min(np.where(seen.fits, figure, np.inf))))
    assert found.counted == counted
    assert found.counted == found.weighed + sum(found.pruned.values())
    first = found.best[0]
    assert first.fits
    assert (first.peak if question.objective == "memory" else first.seconds) == pytest.approx(best, rel=1e-12)
    assert found.gap == 0
    assert found.weighed < counted


def test_the_next_best_are_the_best_of_other_degrees() -> None:
    question = _question(gib=14.0, fix=SMALL, top=5)
    best: dict[tuple[float, ...], float] = {}
    names = ("pipeline", "tensor_x", "tensor_y", "context", "expert")
    for table in _listed(question):
        seen = forecast(table, K)
        seconds = np.where(seen.fits, seen.seconds, np.inf)
        columns = [np.broadcast_to(getattr(table, name), table.n) for name in names]
        columns.append(np.broadcast_to(table.replicate * table.shard, table.n))
        kinds, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        for index, kind in enumerate(kinds):
            least = float(seconds[which.ravel() == index].min())
            best[tuple(kind)] = min(least, best.get(tuple(kind), np.inf))
    told = [choice.seconds for choice in answer(question, K).best]
    assert told == pytest.approx(sorted(best.values())[:5], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "devices", "cluster"),
    [("llama-3-405b", 512, "h100"), ("deepseek-v3", 256, "h800"), ("mixtral-8x7b", 64, "cloudmatrix384")],
)
def test_bounds_are_not_above_forecasts(name: str, devices: int, cluster: str) -> None:
    work = Workload(shape(name), batch=1024, sequence=4096)
    question = Question(workload=work, cluster=Cluster.named(cluster), devices=devices)
    space, base = Space(question), _base(question)
    bounds = Bounds(space, base, K)
    draw = np.random.default_rng(0)

    def some(rows: Columns, n: int) -> Columns:
        return taken(rows, draw.integers(0, rows["micro"].size, n))

    rows, _ = space.micro.expand(space.degrees())
    rows, _ = space.dual.expand(rows)
    rows = some(rows, 300)
    rows["alone"] = bounds.alone(rows)
    rows, _ = space.splits.expand(rows)
    rows = some(rows, 1000)
    rows["floor"] = bounds.floor(rows)
    rows, _ = space.orders.expand(rows)
    rows = some(rows, 1000)
    known = bounds.splits(rows)
    rows["splits"] = known.seconds
    rows, parent = space.schedules.expand(rows)
    rows["scheduled"] = bounds.scheduled(rows, known.take(parent))
    rows = some(rows, 2000)
    for _ in range(3):
        n = rows["micro"].size
        rows["recompute"] = draw.integers(0, 3, n).astype(float)
        rows["recomputed"] = np.ceil(draw.random(n) * space.stage(rows)) / space.stage(rows)
        rows["recomputed"] = np.where(rows["recompute"] == 2, rows["recomputed"], 1.0)
        for share in ("state_on_host", "activations_on_host"):
            rows[share] = draw.choice(space.on_host[share], n)
        seen = forecast(base.replaced(**{name: rows[name] for name in SPREAD}), K)
        for bound in ("alone", "splits", "scheduled"):
            assert np.all(rows[bound] <= seen.seconds), bound
        assert np.all(rows["floor"] <= seen.peak)
    # Bounds that say little would pass as well.
    plain = {
        **rows,
        "recompute": np.zeros(n),
        "state_on_host": np.zeros(n),
        "activations_on_host": np.zeros(n),
    }
    seen = forecast(base.replaced(**{name: plain[name] for name in SPREAD}), K)
    assert np.median(rows["scheduled"] / seen.seconds) > 0.99
    assert np.median(rows["alone"] / seen.seconds) > 0.3


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (answer(_question(gib=14.0, fix=SMALL), K) for _ in range(2))
    assert [choice.spread for choice in first.best] == [choice.spread for choice in second.best]
    assert first.pruned == second.pruned


def test_what_fits_nowhere_has_its_smallest_strategy() -> None:
    found = answer(_question(gib=1.6, fix={"state_on_host": 0, "activations_on_host": 0}, devices=4), K)
    assert not found.best
    assert found.smallest is not None
    assert not found.smallest.fits
    assert found.smallest.peak == min(
        float(forecast(table, K).peak.min()) for table in _listed(found.question)
    )


def test_fixed_columns_hold_and_runnable_keeps_out_pipelines() -> None:
    found = answer(_question(fix={"tensor": 4, "zero": (2, 3), "recompute": "none"}), K)
    assert {(c.spread["tensor_x"], c.spread["recompute"]) for c in found.best} == {(4, "none")}
    assert {c.spread["zero"] for c in found.best} <= {0, 2, 3}
    runs = answer(_question(gib=14.0, runnable=True), K)
    assert {c.spread["pipeline"] for c in runs.best} == {1}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fix": {"tensr_x": 2}}, "did you mean 'tensor_x'"),
        ({"fix": {"method": "rng"}}, "did you mean 'ring'"),
        ({"fix": {"tensor_x": 0}}, "tensor_x is 1 to"),
        ({"fix": {"tensor_x": "many"}}, "fixed to a number"),
        ({"fix": {"recomputed": 1.5}}, "recomputed is 0 to 1"),
        ({"fix": {"tensor_x": 7}}, "no strategy spreads dense over 8 devices"),
        ({"devices": 0}, "open number of devices"),
        ({"devices": -4}, "devices must be"),
        ({"objective": "tme"}, "did you mean 'time'"),
        ({"top": 0}, "top"),
        ({"price": -1.0}, "price"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        answer(_question(**options), K)
