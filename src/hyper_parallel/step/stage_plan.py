"""The plan of a step's stages: what a micro-batch of one kind computes, on which device groups, and in which order.

A pipeline has one kind of micro-batches, and its Program is given by its schedule (`step.pipeline_plan`). Submodels
have several kinds, and the Program of a step is made of what its micro-batches cost (`step.submodel_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from hyper_parallel.errors import CaptureError, GraphError, StrategyError
from hyper_parallel.graph import StepGraph, rewritten
from hyper_parallel.graph.guards import Question
from hyper_parallel.graph.partition import StageOf
from hyper_parallel.layout import Layout
from hyper_parallel.program import Program
from hyper_parallel.runtime.build_program import ProgramKind
from hyper_parallel.schedule import Costs, MicroBatchKind, Schedule
from hyper_parallel.shard.memory import recompute_pass, recomputed_modules, regather_pass
from hyper_parallel.step.pipeline_stages import PipelineStages, pipeline_stages
from hyper_parallel.strategy import Strategy

T = TypeVar("T")
StagePair = tuple[int, int]
"""Stage of a forward pass, stage of the backward pass that runs beside it."""


@dataclass(frozen=True, eq=False)
class StagePlan:
    """How micro-batches of one kind run: of the same shapes, and with the same answers to what the model asks of their
    values."""

    stages: PipelineStages
    placement: tuple[int, ...]
    """The device group of each stage."""
    owners: Mapping[str, tuple[int, ...]]
    """Parameter or buffer to the places of the device groups that hold it."""
    described: tuple[str, ...] = ()
    """Lines for people: the stages and their schedule, or the values that cross."""
    trains: bool = True
    """Has backward passes; an evaluation has none."""
    layers: tuple[int, ...] = ()
    """Layers of each stage of a pipeline."""
    schedule: Schedule | None = None
    """The order of a pipeline's training step."""
    program: Program | None = None
    """With this order; None where that of a step follows from its kinds of micro-batches."""
    turns: Mapping[StagePair, tuple[int, ...]] = field(default_factory=dict)
    """Of each pair of a forward and a backward stage, the order in which their tasks run."""
    costs: Costs | None = None
    """By which the order of a step with several kinds is made."""
    layouts: Mapping[str, Mapping[str, Layout]] = field(default_factory=dict)
    """As of `ProgramKind`."""
    questions: Sequence[Question] = ()
    """What the model asked of this rank's rows."""
    documents: bool = False
    """Rows may hold several documents."""

    def priced(self, count: int) -> MicroBatchKind:
        """Of so many micro-batches, in a step."""
        assert self.costs is not None, "the order of a pipeline is given"
        cut = self.stages.partition.stages
        return MicroBatchKind(
            self.costs,
            self.placement,
            {(stage.number, one.target): 0.0 for stage in cut for one in stage.sends},
            {(stage.number, one.target): 0.0 for stage in cut for one in stage.gradients_out},
            count,
        )

    def in_program(self, count: int) -> ProgramKind:
        """As a part of a step's Program."""
        return ProgramKind(self.stages.partition, self.placement, self.layouts, count)


def owners_of(
    stages: PipelineStages, placement: Sequence[int], rest: Callable[[str], int] = lambda name: 0
) -> dict[str, tuple[int, ...]]:
    """Parameter or buffer to the device groups that hold it. `placement`: the group of each stage; `rest`: that of what
    no stage uses, by name."""
    found = {}
    for entry, users in stages.users.items():
        name = entry.partition(".")[2]
        found[name] = tuple(sorted({placement[stage] for stage in users} or {rest(name)}))
    return found


def captured_or_refused(capture: Callable[[], T], why: str) -> T:
    """What `capture` gives. Raises StrategyError, which begins with `why`, where the step cannot be captured."""
    try:
        return capture()
    except CaptureError as error:
        raise StrategyError(f"{why}: {error}") from error


def cut_micro_batch(
    whole: StepGraph,
    stage_of: StageOf,
    stages: int,
    strategy: Strategy,
    rewrite: Callable[[StepGraph], StepGraph] = lambda step: step,
    *,
    kind: int | None = None,
    refused: Callable[[GraphError], str] = "axes.pipeline: {}".format,
) -> PipelineStages:
    """The stages of a captured micro-batch. `rewrite`, `kind`: as of `pipeline_stages`. Raises StrategyError, of which
    `refused` makes the text."""
    try:
        return pipeline_stages(whole, stage_of, stages, strategy.memory.shard, rewrite, kind=kind)
    except GraphError as error:
        raise StrategyError(refused(error)) from error


def memory_passes(
    model: nn.Module, strategy: Strategy, counts: Sequence[int] | None = None
) -> Callable[[StepGraph], StepGraph]:
    """Have layers recomputed and weights gathered again, as the strategy says. `counts`: the layers of each stage."""
    again = recomputed_modules(model, strategy, counts)
    passes = [recompute_pass(strategy, again), regather_pass(strategy)]
    return lambda step: rewritten(step, [one for one in passes if one is not None])
