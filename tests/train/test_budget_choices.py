"""Runs under a budget that compute again and reorder: every loss, norm, parameter and moment, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Ran, differences, few, of_graph, run_engine
from tiny_run import LLAMA

from harness import run_ranks
from hyper_parallel.offloading import Rate, open_tiers
from hyper_parallel.offloading.schedule import graph_search

# A link so slow that almost anything is cheaper than a copy, whatever machine this is.
SLOW = Rate(1e-6, 5e7)
MEMORY = {"host": "64MiB", "cluster": "h100", "update": "device"}


def _both(rank: int, world: int, folder: Path, device: str, sections: dict[str, Any]) -> tuple[Ran, Ran]:
    strategy = {**sections["strategy"], "precision": {"compute": "bfloat16"}}
    sections = {
        **few(sections),
        "model": {"config": LLAMA},
        "strategy": {**strategy, "memory": {"device": device, **MEMORY}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_tiers, "measure", lambda *given: (SLOW, SLOW))
        patch.setattr(graph_search, "REPAID", 10**9)  # steps of this size are too quick to be worth a search
        changed = run_engine(rank, folder, "changed", "graph", sections)
    sections = {**sections, "strategy": strategy}
    return changed, run_engine(rank, folder, "plain", "eager", sections)


def _check(changed: Ran, plain: Ran) -> None:
    said = [note for note in changed.notes if note.startswith("memory: ")]
    assert any("computed again" in note for note in said) and of_graph(changed)
    assert differences(changed, plain) == {}


def test_steps_with_storages_computed_again_are_equal_to_the_bit(tmp_path: Path) -> None:
    _check(*_both(0, 1, tmp_path, "450KiB", {"strategy": {}}))


@pytest.mark.matrix
def test_two_workers_that_choose_for_themselves_are_equal_to_the_bit(tmp_path: Path) -> None:
    sections = {"strategy": {"axes": {"shard": 2}}, "train": {"micro_batch": 2}}
    for ran in run_ranks(_both, 2, tmp_path, "420KiB", sections):
        _check(*ran)
