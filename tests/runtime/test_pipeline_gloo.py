"""Pipelines on real workers: every gradient has the bits of the same graph in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from harness.families import FAMILIES
from harness.pipelines import Captured, StepRun, even_cut
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.graph.stage_graph import partition
from hyper_parallel.layout import Mesh
from hyper_parallel.program import DeviceGroup
from hyper_parallel.runtime.build_program import pipeline_program
from hyper_parallel.runtime.rank_transfers import ProcessTransfers
from hyper_parallel.schedule import named_schedule

MICRO = 4
LISTS = {"gpt2": ("transformer.h",)}


def _worker(rank: int, world: int, folder: Path, family: str, schedule: str) -> dict[str, float]:
    """The largest difference of each output of this rank's stages from the graph in one piece."""
    found = Captured(FAMILIES[family], count=MICRO)
    cut = partition(
        found.step, by_modules(even_cut(found.model, world, *LISTS.get(family, ("model.layers",)))), world
    )
    groups = [DeviceGroup(Mesh(("shard", 1)), (at,), f"stage {at}") for at in range(world)]
    program = pipeline_program(cut, named_schedule(schedule, world, MICRO), groups)
    runs = StepRun(program, cut, found.state, rank, ProcessTransfers(rank, deadline=60.0))
    runs.compare()
    whole = found.whole()
    for _ in range(2):
        staged = runs.step(found.batches)
    assert staged
    return {
        name: float((value - whole[name]).abs().max())
        for name, value in staged.items()
        if name not in cut.shared
    }


@pytest.mark.parametrize(
    ("family", "schedule"), [("llama", "1f1b"), ("llama-tied", "zb-h1"), ("mixtral", "gpipe")]
)
def test_gradients_of_a_pipeline_have_the_bits_of_one_piece(
    tmp_path: Path, family: str, schedule: str
) -> None:
    by_rank: list[Any] = run_ranks(_worker, 2, tmp_path, family, schedule)
    names = [name for found in by_rank for name in found]
    assert len(names) == len(set(names))
    assert "loss" in names
    assert all(worst == 0.0 for found in by_rank for worst in found.values())
