"""Runs whose collectives are in an order of their own: the same results, on all ranks, whatever the rows hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Ran, differences, of_graph, packed_text, run_engine
from tiny_run import run_config

from harness import run_ranks
from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.presets import preset_of
from hyper_parallel.errors import ConfigError
from hyper_parallel.graph import Pass
from hyper_parallel.offloading import pass_pipeline
from hyper_parallel.overlap.collective_order import APART, order_pass
from hyper_parallel.strategy import Overlap, Strategy

TRAIN = {"steps": 5, "batch": 8, "micro_batch": 2}
NONE, USUAL, SIMULATED = {"schedule": "none"}, {"schedule": "usual"}, {"cluster": "h100x2"}


def _runs(
    rank: int, world: int, folder: Path, name: str, sections: dict[str, Any], overlaps: list[dict[str, str]]
) -> list[Ran]:
    def ran(at: int, overlap: dict[str, str]) -> Ran:
        strategy = {**sections["strategy"], "overlap": overlap}
        given = {**sections, "strategy": strategy, "train": {**TRAIN, **sections.get("train", {})}}
        return run_engine(rank, folder, f"{name}-{at}", "graph", given)

    return [ran(at, overlap) for at, overlap in enumerate(overlaps)]


def _simulated(ran: Ran) -> list[str]:
    return [note for note in ran.notes if note.startswith("overlap, simulated on h100x")]


@pytest.mark.parametrize("axis", ["shard", pytest.param("tensor", marks=pytest.mark.matrix)])
def test_two_workers_are_equal_to_the_bit(axis: str, tmp_path: Path) -> None:
    sections = {"strategy": {"axes": {axis: 2}, "sequence": axis == "tensor"}, "data": {"pack": False}}
    for plain, usual, chosen in run_ranks(_runs, 2, tmp_path, axis, sections, [NONE, USUAL, SIMULATED]):
        assert of_graph(plain) and not _simulated(plain)
        assert differences(usual, plain) == {}
        assert of_graph(chosen)
        [told] = _simulated(chosen)
        assert "nothing pays" not in told and APART not in chosen.notes
        assert differences(chosen, plain) == {}


@pytest.mark.matrix
def test_four_workers_are_equal_to_the_bit(tmp_path: Path) -> None:
    sections = {"strategy": {"axes": {"shard": 2, "tensor": 2}, "sequence": True}, "data": {"pack": False}}
    for plain, chosen in run_ranks(
        _runs, 4, tmp_path, "four", sections, [NONE, {"cluster": "h100x4"}], timeout=240
    ):
        assert of_graph(chosen) and len(_simulated(chosen)) == 1 and APART not in chosen.notes
        assert differences(chosen, plain) == {}


def test_all_ranks_and_steps_take_rows_for_packed_where_some_are(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    sections = {
        "strategy": {"axes": {"shard": 2}},
        "data": packed_text(tmp_path / "text"),
        "train": {"batch": 4, "micro_batch": 2},
    }
    for plain, chosen in run_ranks(_runs, 2, tmp_path, "packed", sections, [NONE, SIMULATED]):
        for ran in (plain, chosen):
            [captured] = [note for note in ran.notes if "the step as a graph" in note]
            assert captured.count("2 × 32, packed") == 1
            assert of_graph(ran)
        assert differences(chosen, plain) == {}


def _apart(rank: int, world: int, folder: Path) -> list[Ran]:
    """Rank 1 orders its collectives by another cluster."""

    def own_order(strategy: Strategy, cluster: Cluster | None, device: Any) -> Pass | None:
        overlap = strategy.overlap
        if rank == 1 and overlap.schedule != "none":
            strategy = strategy.model_copy(update={"overlap": Overlap(schedule="usual")})
        return order_pass(strategy, cluster, device)

    pass_pipeline.order_pass = own_order
    sections = {"strategy": {"axes": {"shard": 2}}, "data": {"pack": False}}
    return _runs(rank, world, folder, "apart", sections, [NONE, SIMULATED])


def test_ranks_that_find_different_orders_keep_the_captured_one(tmp_path: Path) -> None:
    for plain, chosen in run_ranks(_apart, 2, tmp_path):
        assert [note for note in chosen.notes if note == APART] == [APART]
        assert of_graph(chosen)
        assert differences(chosen, plain) == {}


def _named(overlap: dict[str, str], device: str = "cpu", **axes: int) -> str | None:
    found = order_pass(Strategy(axes=axes or {"shard": 2}, overlap=overlap), None, device)
    return None if found is None else found.name


def test_what_orders_the_collectives() -> None:
    assert _named({}) == "layered"
    assert _named(NONE) is None
    assert _named(USUAL) == "layered"
    assert _named(SIMULATED) == "overlap"
    assert _named(SIMULATED, shard=1) is None


@pytest.mark.parametrize(
    ("device", "preset"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GB200", "gb200-nvl72"), ("Some Future Device", None)],
)
def test_the_preset_of_a_device(device: str, preset: str | None) -> None:
    assert preset_of(device) == preset


def test_a_cluster_needs_a_device_and_a_schedule_that_simulates(tmp_path: Path) -> None:
    Cluster(node=2).dump(tmp_path / "levels.yaml")
    with pytest.raises(ConfigError, match="describes no device"):
        _named({"cluster": str(tmp_path / "levels.yaml")})
    with pytest.raises(ConfigError, match=r"no cluster 'h1000'.*'h100'"):
        _named({"cluster": "h1000"})
    with pytest.raises(ValueError, match="set schedule to auto, or leave cluster out"):
        run_config(tmp_path, strategy={"overlap": {"schedule": "none", "cluster": "h100"}})
    with pytest.raises(ValueError, match="set schedule to auto, or leave pieces out"):
        run_config(tmp_path, strategy={"overlap": {"schedule": "usual", "pieces": True}})
