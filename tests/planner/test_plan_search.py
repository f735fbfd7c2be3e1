"""The search finds the model's optimum, its bounds are bounds, and its counts are those of listing every point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.columns import Array, Columns, taken
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.memory import HOST_PART, on_host
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.framework_profiles import GENERIC, HYPER_PARALLEL
from hyper_parallel.planner.lower_bounds import Bounds
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import PIPELINES
from hyper_parallel.planner.search import _Best, search
from hyper_parallel.planner.space import StrategySpace
from hyper_parallel.planner.table import SPREAD
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Adapter, Workload
from planner.plan_cases import BLOCKS, EXPERTS, HYBRID, base, listed, question

K = Constants()
SMALL = {"state_on_host": (0.0, 1.0), "activations_on_host": (0.0, 0.5), "micro": (1, 2)}
CASES = [
    pytest.param(question(gib=80.0, fix=SMALL), id="roomy"),
    pytest.param(question(gib=14.0, fix=SMALL), id="tight"),
    pytest.param(question(gib=7.5, fix=SMALL), id="tighter"),
    pytest.param(question(EXPERTS, gib=16.0, devices=4, fix=SMALL), id="experts"),
    pytest.param(question(gib=14.0, objective="memory", fix=SMALL), id="memory"),
    pytest.param(
        question(gib=20.0, fix={"recompute": "full", "recomputed": (0.5, 1.0)}, devices=4), id="fixed"
    ),
    pytest.param(question(gib=14.0, runnable=True), id="runnable"),
    pytest.param(question(gib=9.0, host_gib=2.0, slower=20, fix=SMALL), id="small host"),
    pytest.param(question(gib=7.0, host_gib=4.0, objective="memory", fix=SMALL), id="memory, small host"),
    pytest.param(question(HYBRID, gib=14.0, fix=SMALL), id="hybrid"),
    pytest.param(question(BLOCKS, gib=14.0, devices=4, fix=SMALL), id="hybrid of blocks with experts"),
    pytest.param(question(gib=8.0, adapter=Adapter(16), fix=SMALL), id="adapters"),
    pytest.param(
        question(EXPERTS, gib=16.0, devices=4, prediction_modules=1, fix=SMALL), id="one token more"
    ),
    *(
        pytest.param(
            question(EXPERTS, gib=20.0, devices=4, slower=slower, profile=HYPER_PARALLEL, fix=SMALL),
            id=f"experts in pairs, links {slower} times as slow",
        )
        for slower in (1, 20)
    ),
]


@pytest.mark.parametrize("asked", CASES)
def test_the_answer_is_the_best_of_all_points(asked: Question) -> None:
    found = search(asked, K)
    best, counted = float("inf"), 0
    for table in listed(asked):
        seen = estimate(table, K)
        figure = seen.peak if asked.objective == "memory" else seen.seconds
        counted += table.n
        best = min(best, float(np.min(np.where(seen.fits, figure, np.inf))))
    assert found.counted == counted
    assert found.counted == found.weighed + sum(found.pruned.values())
    first = found.best[0]
    assert first.fits
    assert (first.peak if asked.objective == "memory" else first.seconds) == pytest.approx(best, rel=1e-12)
    assert found.gap == 0
    assert found.weighed < counted


def test_the_next_best_are_the_best_of_other_degrees() -> None:
    asked = question(gib=14.0, slower=3, fix=SMALL, top=5)
    best: dict[tuple[float, ...], float] = {}
    names = ("pipeline", "tensor_x", "tensor_y", "context", "expert")
    for table in listed(asked):
        seen = estimate(table, K)
        seconds = np.where(seen.fits, seen.seconds, np.inf)
        columns = [np.broadcast_to(getattr(table, name), table.n) for name in names]
        columns.append(np.broadcast_to(table.replicate * table.shard, table.n))
        kinds, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        for index, kind in enumerate(kinds):
            least = float(seconds[which.ravel() == index].min())
            best[tuple(kind)] = min(least, best.get(tuple(kind), np.inf))
    # Of those that take as long and differ in data and context alone, one.
    once = {(*kind[:3], kind[4], float(f"{seconds:.8e}")): seconds for kind, seconds in best.items()}
    told = [choice.seconds for choice in search(asked, K).best]
    assert told == pytest.approx(sorted(once.values())[:5], rel=1e-9)


def test_of_equal_times_fewer_axes_win() -> None:
    # Nothing is exchanged but gradients, over the same ranks.
    found = search(question(gib=80.0, devices=4, fix={"tensor": 1, "pipeline": 1, "micro": (1, 2)}), K)
    seconds = [round(choice.seconds, 8) for choice in found.best]
    assert len(seconds) == len(set(seconds))
    # With context the same time needs less memory, and yet more machinery.
    rows = {name: np.full(2, float(value)) for name, value in SPREAD.items()}
    rows |= {"shard": np.array([2.0, 4.0]), "context": np.array([2.0, 1.0]), "kind": np.array([0.0, 1.0])}
    kinds = _Best(top=2, by_memory=False, kinds=2)
    kinds.add(rows, np.array([1.0, 1.0 + 1e-12]), np.array([5.0, 6.0]))
    assert [row["context"] for row in kinds.best()] == [1.0]


def _named(name: str) -> Cluster:
    """A preset; one whose nodes are joined by quicker links than their devices are, too."""
    h100 = Cluster.named("h100")
    if name != "upside down":
        return h100 if name == "cut by cost" else Cluster.named(name)
    node, network = h100.links["node"], h100.links["network"]
    links = {"node": replace(network, level="node"), "network": replace(node, level="network")}
    return replace(h100, links={**h100.links, **links})


@pytest.mark.parametrize(
    ("name", "devices", "cluster"),
    [
        ("llama-3-405b", 512, "h100"),
        ("llama-3-8b", 32, "cut by cost"),
        ("llama-3-70b", 128, "upside down"),
        ("deepseek-v3", 256, "upside down"),
        ("deepseek-v3", 256, "h800"),
        ("mixtral-8x7b", 64, "cloudmatrix384"),
        ("nemotron-3-nano", 64, "h100"),
        ("llama-3-70b, adapters", 64, "h100"),
        ("deepseek-v3, one token more", 256, "h800"),
        ("nemotron-3-super, one token more", 256, "cut by cost"),
        ("deepseek-v3, in pairs", 256, "h800"),
        ("mixtral-8x7b, in pairs", 64, "cloudmatrix384"),
    ],
)
@pytest.mark.parametrize("constants", [K, fitted()], ids=["prior", "fitted"])
def test_bounds_are_not_above_estimates(name: str, devices: int, cluster: str, constants: Constants) -> None:
    model, _, kind = name.partition(", ")
    work = Workload(shape(model), batch=1024, sequence=4096)
    adapter = Adapter(16, ("attention",)) if kind == "adapters" else None
    work = replace(work, adapter=adapter, prediction_modules=int(kind == "one token more"))
    usual = HYPER_PARALLEL if kind == "in pairs" else GENERIC
    profile = replace(usual, balanced=float(cluster == "cut by cost"))
    asked = Question(workload=work, cluster=_named(cluster), devices=devices, profile=profile)
    space, common = StrategySpace(asked), base(asked)
    bounds = Bounds(space, common, constants)
    draw = np.random.default_rng(0)

    def some(rows: Columns, n: int) -> Columns:
        return taken(rows, draw.integers(0, rows["micro"].size, n))

    rows, _ = space.micro.expand(space.degrees())
    rows, _ = space.dual.expand(rows)
    rows = some(rows, 300)
    rows["alone"] = bounds.alone(rows)
    rows, _ = space.splits.expand(rows)
    rows = some(rows, 1000)
    rows["floor"], rows["again"] = bounds.floor(rows)
    rows, _ = space.orders.expand(rows)
    rows = some(rows, 1000)
    known, fitting = bounds.splits(rows), bounds.splits(rows, rows["again"])
    rows["splits"], rows["splits that fit"] = known.seconds, fitting.seconds
    rows, parent = space.schedules.expand(rows)
    rows["scheduled"] = bounds.scheduled(rows, known.take(parent))
    rows["scheduled that fit"] = bounds.scheduled(rows, fitting.take(parent))
    rows = some(rows, 2000)
    n = rows["micro"].size
    for _ in range(3):
        rows["recompute"] = draw.integers(0, 3, n).astype(float)
        rows["recomputed"] = np.ceil(draw.random(n) * space.stage(rows)) / space.stage(rows)
        rows["recomputed"] = np.where(rows["recompute"] == 2, rows["recomputed"], 1.0)
        rows["activations_on_host"] = draw.choice(space.on_host["activations_on_host"], n)
        rows["state_on_host"], rows["weights_on_host"] = draw.choice(space.levels, n).T
        table = common.replaced(**{name: rows[name] for name in SPREAD})
        seen = estimate(table, constants)
        for bound in ("alone", "splits", "scheduled"):
            assert np.all(rows[bound] <= seen.seconds), bound
        assert np.all((rows["floor"] <= seen.peak) | (on_host(table) > common.host_bytes * HOST_PART))
        # What fits the device by chance is little: all layers, and all that may be moved, are there too.
        rows["recomputed"] = np.where(draw.random(n) < 0.3, rows["recomputed"], 1.0)
        rows["recompute"] = np.where(draw.random(n) < 0.5, rows["recompute"], 2.0)
        table = common.replaced(**{name: rows[name] for name in SPREAD})
        seen = estimate(table, constants)
        assert np.all((np.where(rows["recompute"] == 2, rows["recomputed"], 0.0) >= rows["again"])[seen.fits])
        for bound in ("splits that fit", "scheduled that fit"):
            assert np.all((rows[bound] <= seen.seconds)[seen.fits]), bound
    # Bounds that say little would pass as well.
    plain = {
        **rows,
        "recompute": np.zeros(n),
        "state_on_host": np.zeros(n),
        "activations_on_host": np.zeros(n),
        "weights_on_host": np.zeros(n),
    }
    seen = estimate(common.replaced(**{name: plain[name] for name in SPREAD}), constants)
    assert np.median(rows["scheduled"] / seen.seconds) > 0.99
    assert np.median(rows["alone"] / seen.seconds) > 0.3


def test_links_of_a_supernode_that_is_one_node_do_not_loosen_bounds() -> None:
    asked = Question(
        workload=Workload(shape("deepseek-v3"), batch=1024, sequence=4096),
        cluster=Cluster.named("h100"),
        devices=2048,
    )
    space = StrategySpace(asked)
    rows, _ = space.micro.expand(space.degrees())
    rows, _ = space.dual.expand(rows)

    def alone(**shares: float) -> Array:
        return Bounds(space, base(asked), replace(K, **shares)).alone(rows)

    # H100's network is far slower than its node, whatever share of each is reached.
    assert np.all(alone(inside=0.75, across=0.76) >= 0.97 * alone(inside=0.76, across=0.75))


def test_the_same_question_has_the_same_search() -> None:
    first, second = (search(question(gib=14.0, fix=SMALL), K) for _ in range(2))
    assert [choice.strategy for choice in first.best] == [choice.strategy for choice in second.best]
    assert first.pruned == second.pruned


def test_what_fits_nowhere_has_its_smallest_strategy() -> None:
    found = search(question(gib=1.6, fix={"state_on_host": 0, "activations_on_host": 0}, devices=4), K)
    assert not found.best
    assert found.smallest is not None
    assert not found.smallest.fits
    assert found.smallest.peak == min(
        float(estimate(table, K).peak.min()) for table in listed(found.question)
    )


def test_fixed_columns_hold_and_runnable_keeps_out_what_train_lacks() -> None:
    found = search(question(fix={"tensor": 4, "zero": (2, 3), "recompute": "none"}), K)
    assert {(c.strategy["tensor_x"], c.strategy["recompute"]) for c in found.best} == {(4, "none")}
    assert {c.strategy["zero"] for c in found.best} <= {0, 2, 3}
    runs = search(question(gib=14.0, runnable=True), K)
    assert {c.strategy["schedule"] for c in runs.best} <= set(PIPELINES)


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
        search(question(**options), K)
