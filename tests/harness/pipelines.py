"""Stages of a pipeline run in one process, micro-batch by micro-batch, beside the graph that they were cut from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from harness.captured import micro_batches, recipe_of, text_batch
from harness.equivalence import family_config
from hyper_parallel.compat.fake_tensors import fake_mode, faked
from hyper_parallel.graph import StepGraph, capture, executable, phase
from hyper_parallel.graph.gradients import GRADIENT, owned
from hyper_parallel.graph.ir import GivenTensor, module_state
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.graph.stage_graph import Partition, partition
from hyper_parallel.layout import Mesh
from hyper_parallel.program import DeviceGroup, Program, RunPair
from hyper_parallel.program.build import Schedule
from hyper_parallel.program.instruction_loop import ended
from hyper_parallel.runtime import interpreter
from hyper_parallel.runtime.build_program import pipeline_program
from hyper_parallel.runtime.interpreter import Interpreter, stages_on
from hyper_parallel.runtime.rank_transfers import MemoryTransfers, Transfers, memory_channels
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.step.capture_micro_batch import capture_micro_batch
from hyper_parallel.step.micro_batch import MICRO_FIELDS

Tensors = dict[str, Tensor]
WAIT_S = 60.0


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


def captured_module(model: nn.Module, shape: Sequence[int]) -> StepGraph:
    """A micro-batch of any module: its input ``x``, and the sum of the squares of its output as the loss."""
    with faked(model, mode := fake_mode()), mode:
        given = torch.empty(shape)
        gradients: dict[str, Tensor] = {}
        taken: set[int] = set()

        def body() -> dict[str, Tensor]:
            for name, parameter in model.named_parameters():

                def keep(gradient: Tensor, name: str = name, parameter: nn.Parameter = parameter) -> None:
                    with torch.no_grad():
                        gradients[name] = owned(gradient, parameter, taken)

                parameter.register_hook(keep)
            loss = model(given).square().sum()
            with phase("backward"), torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            return {"loss": loss.detach(), **{GRADIENT + name: one for name, one in gradients.items()}}

        tensors = {**module_state(model), "x": GivenTensor("input", given)}
        return capture(body, tensors, model, lambda: gradients)


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
            for name, value in ended(runner.forward_in_turns(at, batches[at], ports[at])).items():
                ports[at][name] = value

    def back(at: int) -> None:
        for runner in reversed(runners):
            for name, value in ended(runner.input_in_turns(at, ports[at])).items():
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


class StepRun:
    """A rank's part of a Program, with runners of its stages."""

    def __init__(
        self, program: Program, cut: Partition, state: Tensors, rank: int, transfers: Transfers
    ) -> None:
        (group,) = (name for name, one in program.groups.items() if rank in one.ranks)
        paired = any(isinstance(one, RunPair) for one in program.instructions[group])
        self._runners = {
            stage.number: StageRunner(stage, state, pauses=paired) for stage in stages_on(program, cut, group)
        }
        self._runs = Interpreter(program, cut, rank, transfers, torch.device("cpu"), self._runners)
        self.compare = self._runs.compare

    def step(self, batches: Sequence[Tensors]) -> Tensors:
        """The outputs of the rank's stages, summed over the micro-batches."""
        for runner in self._runners.values():
            runner.begin({})
        self._runs.run(batches)
        return interpreter.summed(
            {GRADIENT + name: value for name, value in one.gradients.items()} | one.totals
            for one in self._runners.values()
        )


Runs = Callable[[Program, Partition, Captured, int, MemoryTransfers], Tensors]
"""(program, its stages, what was captured, rank, transfers) to the outputs of a rank's stages."""


def interpreted(
    program: Program, cut: Partition, found: Captured, rank: int, transfers: MemoryTransfers
) -> Tensors:
    """The outputs of a rank's stages, by the interpreter."""
    return StepRun(program, cut, found.state, rank, transfers).step(found.batches)


def run_in_threads(
    found: Captured, schedule: Schedule, runs: Runs = interpreted
) -> tuple[Tensors, Partition]:
    """The outputs of a step by all ranks of a schedule, a thread each."""
    cut = partition(
        found.step, by_modules(even_cut(found.model, schedule.stages, "model.layers")), schedule.stages
    )
    groups = [DeviceGroup(Mesh(("shard", 1)), (at,), f"rank {at}") for at in range(schedule.ranks)]
    program = pipeline_program(cut, schedule, groups)
    channels = memory_channels(schedule.ranks)
    with ThreadPoolExecutor(schedule.ranks) as pool:
        running = [
            pool.submit(runs, program, cut, found, at, MemoryTransfers(at, channels, WAIT_S))
            for at in range(schedule.ranks)
        ]
        return summed(one.result() for one in running), cut
