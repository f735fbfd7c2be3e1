"""Allocations of encoders and a language model, from costs that are written out: search, memory, charts, run file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import from_dict, yaml12
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.submodels.answer import allocated_run_file, answer_of, notes_of
from hyper_parallel.planner.submodels.page import colocated_lanes, disjoint_lanes
from hyper_parallel.planner.submodels.search import (
    Allocations,
    allocations,
    best,
    colocated,
    colocated_sizes,
    disjoint,
    disjoint_bound,
    disjoint_sizes,
    predicted,
)
from hyper_parallel.planner.submodels.sizes import (
    Row,
    Sizes,
    Task,
    copies,
    encoder_bytes,
    media_dealt,
    memory_of_parts,
    rows_dealt,
)
from hyper_parallel.report.html import CAUSES, shares
from hyper_parallel.workload.submodels import EncoderCosts, LanguageCosts, Line, ModelCosts, Passes

GIB = 2.0**30
NONE = Line(0.0, 0.0)


def passes(seconds: float) -> Passes:
    """Of a unit, or a row."""
    return Line(0.0, seconds / 3), Line(0.0, seconds / 3), Line(0.0, seconds / 3)


def encoder(name: str = "vision", seconds: float = 0.1, parameters: int = 10**8) -> EncoderCosts:
    return EncoderCosts(name, (f"model.{name}",), passes(seconds), Line(0.0, GIB), NONE, 1e6, parameters)


def costs(*encoders: EncoderCosts, parameters: int = 10**9) -> ModelCosts:
    degrees = (1, 2)
    language = LanguageCosts(
        layers={degree: passes(0.4 / degree) for degree in degrees},
        head={degree: passes(0.04 / degree) for degree in degrees},
        saved=dict.fromkeys(degrees, Line(0.0, GIB)),
        workspace=dict.fromkeys(degrees, NONE),
        recomputed=dict.fromkeys(degrees, Line(0.0, GIB / 8)),
        depth=8,
        parameters=parameters,
        outside=parameters // 10,
        border=1e6,
    )
    return ModelCosts(encoders, language)


def task(*encoders: EncoderCosts, devices: int = 4, rows: list[Row] | None = None, **other: int) -> Task:
    given = rows or [(1.0,) * len(encoders)] * 8
    return Task(costs(*encoders, **other), Cluster.named("h100"), devices, [given, given])


def test_whole_rows_are_dealt_where_all_data_ranks_have_as_much() -> None:
    two = Sizes(data=2, tensor=1, pipeline=1, rows=1, encoders=(2,))
    assert rows_dealt(two, [(1.0,), (3.0,), (3.0,), (1.0,)]) == {(3.0,): 1, (1.0,): 1}
    # Three images and one are each computed beside a copy.
    assert rows_dealt(two, [(1.0,), (3.0,), (2.0,), (2.0,)]) == {(3.0,): 1, (2.0,): 1, (1.0,): 1}
    assert copies(two, [(1.0,), (3.0,), (2.0,), (2.0,)]) == 2 / 6
    assert copies(two, [(1.0,), (1.0,)]) == 0
    assert rows_dealt(replace(two, encoders=(3,)), [(1.0,)] * 4) is None
    one = replace(two, data=1, encoders=(1,))
    assert rows_dealt(one, [(1.0,), (3.0,), (2.0,), (2.0,)]) == {(3.0,): 1, (2.0,): 2, (1.0,): 1}


def test_media_are_dealt_one_by_one_and_the_most_of_a_rank_counts() -> None:
    sizes = Sizes(data=1, tensor=1, pipeline=1, rows=2, encoders=(3,))
    assert media_dealt(sizes, [(4.0,), (0.0,), (3.0,), (0.0,)]) == {(3.0,): 1, (0.0,): 1}


def test_the_search_ends_early_and_loses_nothing() -> None:
    given = task(encoder(seconds=0.3), encoder("audio", seconds=0.1), devices=6)
    sizes = list(disjoint_sizes(given))
    assert len({one.encoders for one in sizes}) > 4
    plain = best(given, iter(sizes), disjoint)
    found = allocations(given).disjoint
    assert found.seconds == predicted(given, plain).seconds
    assert found.tried < plain.tried
    for one in sizes:
        steps = [disjoint(given, one, rows) for rows in given.steps]
        if None not in steps:
            mean = sum(step.seconds for step in steps if step) / len(steps)
            assert disjoint_bound(given, one) <= mean * (1 + 1e-12)


def test_an_encoder_is_given_devices_where_it_does_not_fit_beside_the_language_model() -> None:
    small = allocations(task(encoder()))
    assert small.colocated.sizes is not None
    # 60 GB of weights and gradients on each rank of one mesh that shards the optimizer alone.
    large = allocations(task(encoder(seconds=2.0, parameters=3 * 10**9), parameters=7 * 10**9, devices=8))
    assert large.colocated.sizes is not None
    assert large.colocated.sizes.shard == "parameters"
    assert large.disjoint.sizes is not None
    need = memory_of_parts(large.task, large.disjoint.sizes)
    assert set(need) == {"vision", "language"}
    assert max(need.values()) <= large.task.capacity


def test_rows_without_a_partner_cost_copies() -> None:
    rows: list[Row] = [(float(n),) for n in (0, 1, 2, 3, 4, 5, 6, 8)]
    given = task(encoder(), rows=rows)
    found = allocations(given).disjoint
    assert found.sizes is not None
    # A second data rank would compute as many rows as the first one: all of them twice.
    assert (found.sizes.data, found.sizes.encoders) == (1, (1,))
    more = replace(given, largest=(20.0,))
    sizes = Sizes(1, 1, 1, 1, (1,))
    assert encoder_bytes(more, sizes, 0, 8) - encoder_bytes(given, sizes, 0, 8) == 2 * 12 * GIB
    sevens = task(encoder(), rows=[(float(n),) for n in (4, 4, 4, 4, 4, 4, 4, 0)])
    forced = best(sevens, iter([Sizes(1, 1, 1, 2, (2,))]), disjoint)
    # Eight rows with four images and two with none, of which one each is a copy.
    assert "compute 20% of their rows twice" in " ".join(notes_of(Allocations(sevens, forced, forced)))


def test_what_does_not_fit_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"no allocation fits 2 devices of .*; give more devices") as caught:
        allocations(task(encoder(), devices=2, parameters=3 * 10**11))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="divides the 7 rows"):
        allocations(task(*map(encoder, ("a", "b", "c")), devices=3, rows=[(1.0, 1.0, 1.0)] * 7))


def test_one_mesh_waits_for_the_data_rank_with_most_work() -> None:
    rows: list[Row] = [(6.0,), (0.0,), (0.0,), (0.0,)]
    given = task(encoder(seconds=1.0), devices=4, rows=rows)
    sizes = Sizes(data=4, tensor=1, pipeline=1, rows=1)
    found = colocated(given, sizes, rows)
    assert found is not None
    assert found.seconds - found.once == pytest.approx(6.0 + 0.44)
    assert found.busy == pytest.approx(6.0 + 4 * 0.44)
    assert sorted(part[0].waits for part in found.ranks) == pytest.approx([0, 6, 6, 6])


@pytest.mark.parametrize("rows", [[(1.0, 1.0)] * 8, [(float(n % 3), float(n == 1)) for n in range(8)]])
def test_work_and_bubbles_of_a_chart_are_all_of_the_devices_time(rows: list[Row]) -> None:
    given = task(encoder(), encoder("audio", 0.3), devices=4, rows=rows)
    found = allocations(given)
    for one, lanes_of in ((found.disjoint, disjoint_lanes), (found.colocated, colocated_lanes)):
        assert one.sizes is not None
        step = one.steps[0]
        lanes = lanes_of(given, one.sizes, step)
        for lane in lanes:
            for before, after in zip(lane.stretches, lane.stretches[1:], strict=False):
                assert after.start == pytest.approx(before.end, abs=1e-9)
            assert lane.stretches[-1].end == pytest.approx(step.seconds)
        share = shares(lanes, given.devices, step.seconds)
        assert sum(share.values()) == pytest.approx(1)
        working = share["encoder"] + share["forward"] + share["backward"]
        assert working == pytest.approx(step.busy / (given.devices * step.seconds))
        assert min(share.values()) > -1e-9
        if one is found.disjoint:
            assert any(share[cause] for cause in CAUSES)
        else:
            assert (share["data"] > 0) is (len({*rows}) > 1)


def run(**sections: object) -> dict[str, object]:
    config = {"model_type": "llava"}
    data = {"train": "rows.jsonl", "eval": "more.jsonl", "sequence": 128}
    return {"version": 1, "out": "runs/x", "model": {"config": config}, "data": data, **sections}


def test_the_run_file_says_what_was_chosen() -> None:
    apart = allocations(task(encoder(seconds=0.4), devices=4))
    given = from_dict(run(train={"batch": 8, "steps": 3, "compile": True}, strategy={"axes": {"shard": 2}}))
    for found in (replace(apart, colocated=best(apart.task, iter(()), colocated)), apart):
        text, _ = allocated_run_file(given, found, "4 devices")
        made = from_dict(yaml12.parse(text, "made"))
        sizes = found.chosen.sizes
        assert sizes is not None
        assert made.launch.workers == sizes.devices
        assert made.train.steps == 3
        assert made.strategy.memory.shard == sizes.shard
        if sizes.encoders:
            parts = made.strategy.submodels
            assert parts["vision"].modules == ("model.vision",)
            assert [one.axes.world for one in parts.values()] == [*sizes.encoders, sizes.language]
        else:
            assert made.strategy.axes.world == sizes.devices
        assert made.data.eval == "more.jsonl"


@pytest.mark.parametrize(
    "strategy", ["auto", {"axes": "auto", "tries": 2}, {"memory": "auto", "axes": {"shard": 2}}]
)
def test_open_axes_are_replaced(strategy: object) -> None:
    found = allocations(task(encoder(seconds=0.4), devices=4))
    given = from_dict(run(train={"batch": 8, "steps": 3}, strategy=strategy))
    text, _ = allocated_run_file(given, found, "4 devices")
    made = from_dict(yaml12.parse(text, "made"))
    assert not made.open
    assert "auto" not in text.partition("strategy:")[2]
    assert "chosen" not in text.partition("strategy:")[2]


def test_the_page_begins_with_the_verdict_and_draws_both() -> None:
    found = allocations(task(encoder(seconds=0.4), encoder("audio"), devices=4))
    answer = answer_of(found, "small <model>", "4 devices of h100", 128)
    lines = answer.short(80).splitlines()
    assert lines[0].startswith("simulated: small <model> on 4 devices of h100: ")
    assert len(lines) <= 10 and max(map(len, lines)) <= 80
    html = answer.page()
    assert html.count("<svg") == 2
    assert "small &lt;model&gt;" in html
    assert html.index("devices of their own") < html.index("<svg")
    assert "audio" in html
    assert "bubbles by cause" in html
    assert "http" not in html.replace("http://www.w3.org", "")
    assert answer.to_json()["chosen"] in ("disjoint", "colocated")
    assert list(colocated_sizes(found.task))
