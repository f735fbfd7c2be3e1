"""Runs whose optimizer updates are on the host against runs without a budget: every bit, on one and several workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Ran, differences, few, of_graph, run_engine
from pydantic import ValidationError
from tiny_run import LLAMA, metrics, run, run_config

from harness import run_ranks

MEMORY = {"device": "1MiB", "host": "64MiB", "update": "host"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("updates")


def _on_host(sections: dict[str, Any], **memory: Any) -> dict[str, Any]:
    strategy = sections.get("strategy", {})
    return {**sections, "strategy": {**strategy, "memory": {**MEMORY, **memory}}}


def _told(ran: Ran) -> str:
    return next(note for note in ran.notes if note.startswith("memory: "))


def test_all_steps_are_equal_to_the_bit(folder: Path) -> None:
    sections = few({"model": {"config": LLAMA}})
    moved = run_engine(0, folder, "host", "graph", _on_host(sections))
    assert of_graph(moved)
    assert "parameters updated on the host" in _told(moved)
    assert differences(moved, run_engine(0, folder, "device", "eager", sections)) == {}


def _both(rank: int, world: int, folder: Path, sections: dict[str, Any]) -> tuple[Ran, Ran]:
    sections = few(sections)
    memory = {"host": None, "pool": "64MiB"} if world > 1 else {}
    moved = run_engine(rank, folder, "host", "graph", _on_host(sections, **memory))
    return moved, run_engine(rank, folder, "device", "eager", sections)


@pytest.mark.matrix
def test_workers_that_share_a_pool_are_equal_to_the_bit(folder: Path) -> None:
    sections = {
        "strategy": {"axes": {"shard": 2}},
        "train": {"micro_batch": 1, "optimizer": {"name": "adamw", "lr": 1e-3}},
    }
    for moved, eager in run_ranks(_both, 2, folder, sections):
        assert "parameters updated on the host" in _told(moved)
        assert differences(moved, eager) == {}


@pytest.mark.matrix
def test_a_run_goes_on_from_a_checkpoint_with_or_without(folder: Path) -> None:
    whole = run_config(folder, "whole")
    run(whole)
    train = whole.train.model_dump(mode="json")
    memory = _on_host({})["strategy"]
    for name, first, second in (("there", memory, {}), ("back", {}, memory)):
        start = run_config(folder, name, train={**train, "steps": 3}, strategy=first)
        start = start.model_copy(
            update={"train": start.train.model_copy(update={"schedule": whole.train.schedule})}
        )
        run(start)
        run(run_config(folder, name, train={**train, "steps": 6}, strategy=second))
        assert metrics(run_config(folder, name), "tokens")[6] == metrics(whole, "tokens")[6]


@pytest.mark.matrix
def test_what_muon_updates_stays_on_the_device(folder: Path) -> None:
    sections = few({"train": {"optimizer": {"name": "muon"}}})
    moved = run_engine(0, folder, "muon-host", "graph", _on_host(sections))
    assert "7 parameters updated on the host" in _told(moved)
    assert differences(moved, run_engine(0, folder, "muon", "eager", sections)) == {}


def test_the_host_computes_in_its_own_memory_only() -> None:
    with pytest.raises(ValidationError, match="'update: host' needs memory"):
        run_config(Path(), strategy={"memory": {"device": "1MiB", "flash": "spill", "update": "host"}})
