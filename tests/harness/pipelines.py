"""Stages of a pipeline run in one process, micro-batch by micro-batch, beside the graph that they were cut from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.captured import micro_batches, recipe_of, text_batch
from hyper_parallel.graph import StepGraph, executable
from hyper_parallel.graph.partition import GRADIENT
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.step.capture_micro_batch import capture_micro_batch
from hyper_parallel.step.capture_train_step import MICRO_FIELDS
from hyper_parallel.verify.matrix import family_config

Tensors = dict[str, Tensor]


class Captured:
    """One micro-batch of a family as a graph, with the tensors of several."""

    def __init__(
        self, family: Mapping[str, Any], strategy: Mapping[str, Any] | None = None, count: int = 2
    ) -> None:
        config = family_config(family, strategy or {}, {"micro_batch": 1})
        recipe = recipe_of(family, config)
        self.model: nn.Module = recipe.model
        micro = micro_batches(recipe.handle, config, text_batch(family))[:count]
        rows, length = micro[0].input_ids.shape
        self.step: StepGraph = capture_micro_batch(recipe, rows, length, len(micro), documents=True)
        self.state: Tensors = {
            f"parameter.{one.name}": one.parameter.detach() for one in recipe.handle.parameters()
        }
        self.state |= {f"buffer.{name}": buffer for name, buffer in recipe.model.named_buffers()}
        given = {"step": torch.tensor(0), "tokens": torch.tensor(100.0)}
        self.batches = [
            {**{f"micro.{key}": getattr(one, key) for key in MICRO_FIELDS}, **given} for one in micro
        ]

    def whole(self) -> Tensors:
        """Outputs of the graph in one piece, summed over the micro-batches."""
        return summed(executable(self.step).run({**self.state, **batch}) for batch in self.batches)


def summed(results: Any) -> Tensors:
    """Sums of the outputs of several runs."""
    total: Tensors = {}
    for result in results:
        for name, value in result.items():
            total[name] = total[name] + value if name in total else value.clone()
    return total


def in_stages(found: Partition, state: Tensors, batches: Sequence[Tensors], *, together: bool) -> Tensors:
    """The same outputs, computed by the stages.

    `together`: all micro-batches are in flight before the first goes back, and weights come last of all.
    """
    runners = [StageRunner(stage, state) for stage in found.stages]
    ports: dict[int, Tensors] = {at: {} for at in range(len(batches))}

    def forward(at: int) -> None:
        for runner in runners:
            for name, value in runner.forward(at, batches[at], ports[at]).items():
                ports[at][name] = value

    def back(at: int) -> None:
        for runner in reversed(runners):
            for name, value in runner.input(at, ports[at]).items():
                ports[at][name] = value

    def weights(at: int) -> None:
        for runner in runners:
            runner.weight(at)

    order = range(len(batches))
    if together:
        for does in (forward, back, weights):
            for at in order:
                does(at)
    else:
        for at in order:
            forward(at)
            back(at)
            weights(at)
    assert all(not runner.in_flight for runner in runners)
    outputs = (
        {GRADIENT + name: value for name, value in one.gradients.items()} | one.totals for one in runners
    )
    return summed(outputs)


def even_cut(model: nn.Module, stages: int, *lists: str) -> dict[str, int]:
    """Layers of these module lists, one list after the other, to stages of as many layers."""
    names = [f"{name}.{at}" for name in lists for at in range(len(model.get_submodule(name)))]  # type: ignore[arg-type]
    return {name: at * stages // len(names) for at, name in enumerate(names)}
