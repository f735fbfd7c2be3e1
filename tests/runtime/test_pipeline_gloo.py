"""Pipelines on real workers: every gradient has the bits of the same graph in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from harness.pipelines import Captured, even_cut
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.partition import GRADIENT, by_modules
from hyper_parallel.graph.stage_graph import partition
from hyper_parallel.layout import Mesh
from hyper_parallel.program import DeviceGroup
from hyper_parallel.runtime.build_program import pipeline_program
from hyper_parallel.runtime.interpreter import Interpreter
from hyper_parallel.schedule import Action, Schedule
from hyper_parallel.verify.families import FAMILIES

MICRO = 4
LISTS = {"gpt2": ("transformer.h",)}


def _one_f_one_b(stages: int, *, split: bool) -> Schedule:
    """1F1B of one stage a rank; `split`: the gradients of inputs before those of weights."""
    from hyper_parallel.program import TaskKind

    def back(stage: int, at: int) -> list[Action]:
        kinds = (TaskKind.INPUT, TaskKind.WEIGHT) if split else (TaskKind.BACKWARD,)
        return [Action(kind, stage, at) for kind in kinds]

    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, MICRO)
        order = [Action(TaskKind.FORWARD, stage, at) for at in range(ahead)]
        for at in range(MICRO):
            order += back(stage, at)
            if at + ahead < MICRO:
                order.append(Action(TaskKind.FORWARD, stage, at + ahead))
        orders.append(tuple(order))
    return Schedule("1f1b", tuple(range(stages)), tuple(orders), MICRO)


def _worker(rank: int, world: int, folder: Path, family: str, split: bool) -> dict[str, float]:
    """The largest difference of each output of this rank's stages from the graph in one piece."""
    found = Captured(FAMILIES[family], count=MICRO)
    cut = partition(found.step, by_modules(even_cut(found.model, world, *LISTS.get(family, ("model.layers",)))), world)
    groups = [DeviceGroup(f"stage {at}", (at,), Mesh(("shard", 1))) for at in range(world)]
    program = pipeline_program(cut, _one_f_one_b(world, split=split), groups)
    runs = Interpreter(program, cut, found.state, rank, deadline=60.0)
    whole = found.whole()
    for _ in range(2):
        values = runs.run(found.batches)
    staged = {GRADIENT + name: value for name, value in values.gradients.items()} | dict(values.totals)
    assert staged
    return {name: float((value - whole[name]).abs().max()) for name, value in staged.items() if name not in cut.shared}


@pytest.mark.parametrize(("family", "split"), [("llama", False), ("llama-tied", True), ("mixtral", True)])
def test_gradients_of_a_pipeline_have_the_bits_of_one_piece(tmp_path: Path, family: str, split: bool) -> None:
    by_rank: list[Any] = run_ranks(_worker, 2, tmp_path, family, split)
    names = [name for found in by_rank for name in found]
    assert len(names) == len(set(names))
    assert "loss" in names
    assert all(worst == 0.0 for found in by_rank for worst in found.values())
