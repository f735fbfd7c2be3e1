"""A step of several micro-batches written out as one graph, against the loop that training runs: bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ran, differences, of_graph, run_engine
from torch import Tensor

from harness import run_ranks
from harness.captured import inputs_of, micro_batches, recipe_of, shape_of
from harness.equivalence import draw_batch, family_config
from harness.families import FAMILIES
from hyper_parallel.graph import Rewrite, StepGraph, executable, is_collective
from hyper_parallel.graph.dependencies import dependencies, reorder
from hyper_parallel.graph.dynamic_sizes import balanced_sizes, largest_sizes
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.graph.pass_manager import SCHEDULE, validate
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.offloading import pass_pipeline
from hyper_parallel.overlap.buckets import priority_order
from hyper_parallel.step.accumulation import AccumulatedExecutable, accumulating, whole_step
from hyper_parallel.step.capture_train_step import capture_one, state
from hyper_parallel.step.recipe import CONTROL_VECTOR

QUICK = ("llama-tied", "gpt2", "mixtral")
"""Tied weights, dropout, experts with an auxiliary loss: looked at in every run of the tests."""
AUXILIARY = {"mixtral": {"output_router_logits": True}}
TEXT = [name for name, fields in FAMILIES.items() if "vision_config" not in fields]


def _host(point: HostPoint, values: Any) -> Tensor | None:
    return torch.zeros(CONTROL_VECTOR) if point is HostPoint.LOAD else None


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in TEXT]
)
@pytest.mark.parametrize("memory", [{}, {"recompute": "layer"}], ids=["", "recompute"])
def test_families_have_the_bits_of_the_loop(name: str, memory: dict[str, Any]) -> None:
    family = {**FAMILIES[name], **AUXILIARY.get(name, {})}
    config = family_config(family, {"memory": memory}, {"micro_batch": 1})
    found = []
    for whole in (False, True):
        torch.manual_seed(0)
        recipe = recipe_of(family, config)
        micro = micro_batches(recipe.handle, config, draw_batch(family))
        assert len(micro) > 2
        kind = shape_of(micro, True).each[0]
        loop = accumulating(capture_one(recipe, kind, len(micro)), "parameters")
        run: Any = AccumulatedExecutable.of(loop, len(micro))
        if whole:
            step = whole_step([loop] * len(micro))
            validate(step, step)
            _check_sizes(step, len(micro))
            run = executable(step)
        for number in range(2):
            run.run(inputs_of(recipe, micro, 100.0, step=number), _host)
        found.append(
            {name: tensor.clone() for name, (_, tensor) in state(recipe.handle, recipe.optimizer).items()}
        )
    loops, expanded = found
    assert {name for name in loops if not torch.equal(loops[name], expanded[name])} == set()


def _check_sizes(step: Any, count: int) -> None:
    """Each micro-batch has data-dependent sizes of its own, and these the parts that they are told of."""
    assert step.even.keys() == step.sizes.keys()
    if step.sizes:
        assert len({even.part for even in step.even.values()}) % count == 0
        assert balanced_sizes(step).keys() == largest_sizes(step, 1.5).keys() == step.sizes.keys()


def _in_turn(step: StepGraph) -> StepGraph:
    """Micro-batches side by side: a node of one, a node of the other."""
    nodes = list(step.nodes)
    free = [node for node in nodes if is_collective(node)]
    seen: Counter[Any] = Counter()
    wish = {}
    for at, node in enumerate(nodes):
        lane = region_of(node).micro_batch
        seen[lane] += 1
        wish[node] = (float(seen[lane]), at)
    return reorder(step, priority_order(nodes, dependencies(step, free), wish), free)


def _four(rank: int, world: int, folder: Path, name: str, sections: dict[str, Any]) -> list[Ran]:
    """The eager step, the loop, and the whole step as one graph, which a profile wants, in two orders."""
    profiled = {**sections, "train": {**sections["train"], "profile": {"steps": 2}}}
    eager = run_engine(rank, folder, name, "eager", sections)
    loop = run_engine(rank, folder, f"{name}-loop", "graph", sections)
    whole = run_engine(rank, folder, name, "graph", profiled)
    order = Rewrite("in turn", _in_turn, provides=frozenset({SCHEDULE, "overlap"}))
    pass_pipeline.order_pass = lambda *_: order
    return [eager, loop, whole, run_engine(rank, folder, f"{name}-pairs", "graph", profiled)]


LEVELS: dict[str, dict[str, Any]] = {
    "parameters": {"axes": {"shard": 2}},
    "gradients": {"axes": {"shard": 2}, "memory": {"shard": "gradients"}},
    "optimizer-bf16": {
        "axes": {"shard": 2},
        "memory": {"shard": "optimizer"},
        "precision": {"compute": "bfloat16"},
    },
    "tensor": {"axes": {"tensor": 2}, "sequence": True},
}


@pytest.mark.parametrize("name", LEVELS)
def test_workers_are_equal_to_the_eager_step(name: str, tmp_path: Path) -> None:
    """Four micro-batches, one after the other or two side by side."""
    batch = 4 if name == "tensor" else 8
    sections = {
        "strategy": {**LEVELS[name], "check": False},
        "train": {"micro_batch": 1, "batch": batch, "steps": 4},
    }
    for eager, *graphs in run_ranks(_four, 2, tmp_path, name, sections):
        for ran in graphs:
            assert of_graph(ran)
            assert differences(ran, eager) == {}
