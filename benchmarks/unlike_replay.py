"""A step of submodels on real gloo workers whose stages sleep: whether it takes as long as simulated."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.layout import DeviceGroup, Mesh
from hyper_parallel.runtime.build_program import step_program
from hyper_parallel.runtime.interpreter import Interpreter
from hyper_parallel.runtime.transfers import ProcessTransfers
from hyper_parallel.runtime.turns import Turns
from hyper_parallel.schedule import Costs, MicroBatchKind, step_schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.ranks import run_ranks
from harness.step_programs import chain_kind

SECONDS = 3.0
"""Of a step, to which costs are scaled."""
STEPS = 5


class SleepingStage:
    """A stage that takes its time, and sends a value of its port's size."""

    def __init__(self, stage: Stage, costs: Costs) -> None:
        self.stage, self.gradients, self.totals = stage, dict[str, Tensor](), dict[str, Tensor]()
        own = stage.number
        self._forward, self._input, self._weight = costs.forward[own], costs.input[own], costs.weight[own]

    in_flight = 0

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing to begin."""

    def forward_in_turns(self, micro_batch: int, batch: Any, received: Any) -> Turns[Tensor]:
        """Sleep through the forward pass."""
        time.sleep(self._forward)
        return {one.name: torch.zeros(one.value.shape) for one in self.stage.sends}
        yield

    def input_in_turns(self, micro_batch: int, received: Any) -> Turns[Tensor]:
        """Sleep through the gradients of inputs."""
        time.sleep(self._input)
        return {one.name: torch.zeros(one.value.shape) for one in self.stage.gradients_out}
        yield

    def backward_in_turns(self, micro_batch: int, received: Any) -> Turns[Tensor]:
        """Both."""
        found = yield from self.input_in_turns(micro_batch, received)
        self.weight(micro_batch)
        return found

    def weight(self, micro_batch: int) -> None:
        """Sleep through the gradients of weights."""
        time.sleep(self._weight)


def _worker(rank: int, world: int, kinds: list[MicroBatchKind]) -> list[float]:
    groups = [DeviceGroup(Mesh(("tensor_x", 1)), (place,), f"group {place}") for place in range(world)]
    schedule = step_schedule(kinds, world).schedule
    parts = [chain_kind(number, groups, kind.placement, kind.count) for number, kind in enumerate(kinds, 1)]
    program, stages = step_program(parts, schedule, groups)
    runners: dict[int, Any] = {}
    first = 0
    for part, kind in zip(parts, kinds, strict=True):
        for stage in part.partition.stages:
            if kind.placement[stage.number] == rank:
                runners[first + stage.number] = SleepingStage(stage, kind.costs)
        first += len(part.placement)
    one = Interpreter(program, stages, {"x": torch.zeros(1)}, rank, ProcessTransfers(rank), runners=runners)
    found = []
    for _ in range(STEPS + 1):
        dist.barrier()
        began = time.perf_counter()
        one.go_on([{}] * program.micro_batches)
        dist.barrier()
        found.append(time.perf_counter() - began)
    return found[1:]


def replayed(name: str, kinds: list[MicroBatchKind]) -> dict[str, Any]:
    """Seconds of a step as simulated and as measured, with transfers that take nothing."""
    groups = 1 + max(rank for kind in kinds for rank in kind.placement)
    apart = [
        MicroBatchKind.chain(replace(kind.costs, transfers=()), kind.placement, kind.count) for kind in kinds
    ]
    scale = SECONDS / step_schedule(apart, groups).makespan

    def scaled(costs: Costs) -> Costs:
        times = {
            key: tuple(scale * one for one in getattr(costs, key))
            for key in ("forward", "backward", "input", "weight")
        }
        return replace(costs, transfers=(), **times)

    scaled_kinds = [MicroBatchKind.chain(scaled(kind.costs), kind.placement, kind.count) for kind in kinds]
    ranks: list[list[float]] = run_ranks(_worker, groups, scaled_kinds, timeout=300.0)
    return {
        "name": name,
        "groups": groups,
        "micro_batches": sum(kind.count for kind in kinds),
        "simulated": step_schedule(scaled_kinds, groups).makespan,
        "measured": statistics.median(map(max, zip(*ranks, strict=True))),
    }
