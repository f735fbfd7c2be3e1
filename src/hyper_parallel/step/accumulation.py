"""Steps of several micro-batches from the captured step of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hyper_parallel.graph import Executable, StepGraph, executable
from hyper_parallel.graph.accumulate import Accumulation, accumulation
from hyper_parallel.graph.data_flow import data_sources, seen_through
from hyper_parallel.graph.execute import Host
from hyper_parallel.graph.gradient_sums import GRADIENT, UNREDUCED, UNSUMMED, gradient_sums
from hyper_parallel.step.micro_batch import LOSS, MICRO_FIELDS, ROWS, WEIGHT
from hyper_parallel.strategy.memory import ShardLevel


def accumulating(step: StepGraph, level: ShardLevel) -> Accumulation:
    """The graphs of a step that was captured for one of several micro-batches. `level`: of `memory.shard`."""
    returned = step.returned
    parts = {name: [node] for name, node in returned.items() if name.startswith(GRADIENT)}
    cut_at = gradient_sums(returned, parts, data_sources(step), lambda _: level == "optimizer")
    each_time = {
        name: node
        for name, node in returned.items()
        if name == LOSS
        or name.startswith(ROWS)
        or (
            name.startswith(GRADIENT)
            and not name.startswith((UNREDUCED, UNSUMMED))
            and name.removeprefix(GRADIENT) not in cut_at.reduced
        )
    }
    weights = {name: seen_through(node) for name, node in returned.items() if name.startswith(WEIGHT)}
    sums = {name: seen_through(node) for name, node in each_time.items()}
    batch = {f"micro.0.{key}" for key in MICRO_FIELDS}
    return accumulation(step, weights, {**cut_at.sums, **sums}, batch)


@dataclass(frozen=True)
class AccumulatedExecutable:
    """Runs a step of several micro-batches, as `Executable` runs one that was captured whole."""

    graphs: Accumulation
    first: Executable
    middle: Executable
    last: Executable
    micro_batches: int

    @classmethod
    def of(
        cls,
        graphs: Accumulation,
        micro_batches: int,
        prepared: Callable[[StepGraph], StepGraph] = lambda step: step,
    ) -> AccumulatedExecutable:
        """`prepared`: what is done to each graph before it runs."""
        first, last = (executable(prepared(part)) for part in (graphs.first, graphs.last))
        same = graphs.middle is graphs.first
        middle = first if same else executable(prepared(graphs.middle))
        return cls(graphs, first, middle, last, micro_batches)

    def run(self, tensors: Mapping[str, Tensor], host: Host | None = None) -> dict[str, Tensor]:
        """Run the step on `tensors`: as of `Executable.run`, with the micro-batches as of `batch_inputs`."""
        totals = {
            name: torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=v.device).zero_()
            for name, v in self.graphs.totals.items()
        }
        weights: dict[str, Tensor] = {}
        for index in range(self.micro_batches):
            micro = {f"micro.0.{key}": tensors[f"micro.{index}.{key}"] for key in MICRO_FIELDS}
            given = {**tensors, **micro, **totals, **weights}
            if index == 0:
                weights = self.first.run(given)
            elif index < self.micro_batches - 1:
                self.middle.run(given)
            else:
                self.last.run(given, host)
        return {}

    def node_of(self, error: BaseException) -> fx.Node | None:
        """As of `Executable`."""
        return self.first.node_of(error) or self.middle.node_of(error) or self.last.node_of(error)
