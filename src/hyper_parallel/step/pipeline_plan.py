"""Plans a run's pipeline: captures a micro-batch, cuts it into stages, orders their tasks, and builds the Program.

Everything is a function of the run file, equal on every rank but for the shapes of its shards; where these count, in
the costs of stages, the ranks agree on those of the first one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.stage_cut import NodeCost, balanced_counts, flops_cost, layer_stages
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.overlap.merge_tasks import MergedTasks, Task, merge_tasks
from hyper_parallel.runtime.build_program import choose_schedule, pipeline_program
from hyper_parallel.runtime.stage_costs import parts_of, stage_costs
from hyper_parallel.schedule import Costs, Schedule, check_pipeline, pairs_of_stages, stages_of
from hyper_parallel.shard.model_structure import layers_or_refuse
from hyper_parallel.shard.process_mesh import PipelinePlace
from hyper_parallel.step.capture_micro_batch import (
    ForwardOutputs,
    capture_evaluation,
    capture_micro_batch,
    next_logits,
    summed_loss,
)
from hyper_parallel.step.micro_batch import PLACE, blank_like, blank_micro_batch
from hyper_parallel.step.pipeline_stages import PipelineStages
from hyper_parallel.step.recipe import GradientRecipe
from hyper_parallel.step.stage_plan import (
    StagePair,
    StagePlan,
    captured_or_refused,
    cut_micro_batch,
    memory_passes,
    owners_of,
)
from hyper_parallel.strategy import Strategy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepShape:
    """What a pipeline is planned for."""

    rows: int
    length: int
    count: int
    """Micro-batches of a step."""
    documents: bool
    """Rows may hold several documents."""


class PipelinePlanner:
    """Plans on the shadow of a run's model, which has no values."""

    def __init__(
        self,
        shadow: GradientRecipe,
        strategy: Strategy,
        device: torch.device | str,
        agree: Callable[[Any], Any] = lambda found: found,
    ) -> None:
        """`strategy`: with its pipeline. `agree`: of what each rank has found, gives all of them the same: costs depend
        on a rank's own shards, and ranks that cut or order stages differently would not meet in their collectives."""
        place = shadow.handle.pipeline
        assert place is not None, "the shadow was parallelized for a pipeline"
        self.shadow, self._strategy, self._device, self._agree = shadow, strategy, device, agree
        self.place: PipelinePlace = place
        self._layers, _ = layers_or_refuse(shadow.model, "axes.pipeline")

    def training(self, shape: StepShape, like: StagePlan | None = None) -> StagePlan:
        """The plan of training steps. `like`: of another shape, whose parameters the ranks hold already. Raises
        StrategyError."""
        check_pipeline(self._strategy, shape.count)
        whole = captured_or_refused(
            lambda: capture_micro_batch(
                self.shadow,
                shape.rows,
                shape.length,
                shape.count,
                documents=shape.documents,
                device=self._device,
            ),
            _UNCAPTURED,
        )
        counts = self._agree(self._counts(whole)) if like is None else like.layers
        stages = self._cut(whole, counts, memory_passes(self.shadow.model, self._strategy.of_stage, counts))
        costs, turns = self._agree(self._priced(stages, flops_cost(whole)))
        pipeline, ranks = self._strategy.pipeline, self._strategy.axes.pipeline
        schedule = choose_schedule(pipeline, ranks, shape.count, costs)
        if pipeline.overlap_forward_backward and not schedule.pairs and self.place.index == 0:
            log.warning(
                "pipeline.overlap_forward_backward has no effect: no forward pass beside a backward pass makes the "
                "step shorter; it hides collectives of a stage's own axes (tensor, expert, context), where there are "
                "enough micro-batches"
            )
        owners = owners_of(stages, schedule.placement)
        if like is not None and owners != like.owners:
            raise StrategyError(
                f"axes.pipeline: with {shape.count} micro-batches of {shape.rows} × {shape.length} positions the ranks "
                "would need other weights than they hold; name a schedule (pipeline.schedule), or give rows of one "
                "shape"
            )
        return StagePlan(
            stages,
            schedule.placement,
            owners,
            described=(_described(counts, schedule),),
            layers=tuple(counts),
            schedule=schedule,
            program=pipeline_program(stages.partition, schedule, self.place.groups),
            turns={pair: turns[pair] for pair in pairs_of_stages(schedule)},
            documents=shape.documents,
        )

    def evaluation(self, like: StagePlan, shape: StepShape, loss: LossConfig | None = None) -> StagePlan:
        """The plan of forward passes without gradients, cut like the training's, for any number of micro-batches.
        Raises StrategyError."""
        return self._forward(like, shape, summed_loss(loss))

    def sampling(self, like: StagePlan, shape: StepShape) -> StagePlan:
        """As `evaluation`, of the logits behind one place. Raises StrategyError."""
        return self._forward(like, shape, next_logits, {PLACE: torch.zeros(1, dtype=torch.int64)})

    def _forward(
        self,
        like: StagePlan,
        shape: StepShape,
        outputs: ForwardOutputs,
        extra: Mapping[str, Tensor] | None = None,
    ) -> StagePlan:
        """`extra`: as of `MicroBatch`."""
        rows = replace(blank_micro_batch(shape.rows, shape.length, "meta"), extra=extra or {})
        whole = captured_or_refused(
            lambda: capture_evaluation(
                self.shadow,
                partial(blank_like, rows, self._device),
                outputs,
                documents=shape.documents,
                device=self._device,
            ),
            _UNCAPTURED,
        )
        stages = self._cut(whole, like.layers, lambda step: step)
        owners = owners_of(stages, like.placement)
        return StagePlan(stages, like.placement, owners, trains=False, documents=shape.documents)

    def _priced(
        self, stages: PipelineStages, cost: NodeCost
    ) -> tuple[Costs, dict[StagePair, tuple[int, ...]]]:
        """The costs of the stages, and the order in which the tasks of each pair would run."""
        found = stage_costs(stages.partition, cost)
        if not self._strategy.pipeline.overlap_forward_backward:
            return found, {}
        cut = stages.partition.stages
        pairs = pairs_on_one_rank(len(cut), self._strategy.axes.pipeline)
        merged = merged_pairs(cut, [cost] * len(cut), pairs)
        turns = {pair: one.turns for pair, one in merged.items()}
        return replace(found, hidden=hidden_matrix(len(cut), merged)), turns

    def _counts(self, whole: StepGraph) -> tuple[int, ...]:
        asked, ranks = self._strategy.pipeline, self._strategy.axes.pipeline
        if asked.layers is None:
            return balanced_counts(whole, self._layers, stages_of(asked, ranks), flops_cost(whole))
        return tuple(asked.layers)

    def _cut(
        self, whole: StepGraph, counts: tuple[int, ...], rewrite: Callable[[StepGraph], StepGraph]
    ) -> PipelineStages:
        return cut_micro_batch(
            whole, layer_stages(self._layers, counts, whole), len(counts), self._strategy, rewrite
        )


_UNCAPTURED = "axes.pipeline: the model cannot be cut, since its step cannot be captured"


def _described(counts: Sequence[int], schedule: Schedule) -> str:
    layers = "+".join(map(str, counts))
    count = sum(len(places) for places in schedule.pairs)
    pairs = f", {count} forward passes beside backward passes" if count else ""
    return f"pipeline: {len(counts)} stages of {layers} layers, schedule {schedule.name}{pairs}"


# Pairs of a pipeline's tasks: a forward pass merged with another one's gradients of inputs (`overlap.merge_tasks`).
#
# What follows in a backward pass, the gradients of weights, is no part of the pair, since what goes back is sent
# before; but where nothing goes back, in the first stage, it is (`runtime.interpreter`).


def pairs_on_one_rank(stages: int, ranks: int) -> list[StagePair]:
    """The pairs of stages that some schedule has on one rank: neighbours, interleaved ones, or the ends of a V."""
    parts = stages // ranks

    def together(one: int, other: int) -> bool:
        return (
            one // parts == other // parts
            or one % ranks == other % ranks
            or (one + other) % (2 * ranks) == 2 * ranks - 1
        )

    return [(one, other) for one in range(stages) for other in range(stages) if together(one, other)]


def merged_pairs(
    stages: Sequence[Stage], costs: Sequence[NodeCost], pairs: Iterable[StagePair], slowdown: float = 1.0
) -> dict[StagePair, MergedTasks]:
    """The merged tasks of pairs of these stages. `costs`: of each stage's nodes; `slowdown`: as of `merge_tasks`."""
    tasks = []
    for stage, cost in zip(stages, costs, strict=True):
        forward, before, after = parts_of(stage)
        back = before if stage.gradients_out else [*before, *after]
        tasks.append((Task(stage.step, forward, cost), Task(stage.step, back, cost)))
    return {
        (ahead, back): merge_tasks(tasks[ahead][0], tasks[back][1], slowdown=slowdown)
        for ahead, back in pairs
    }


def hidden_matrix(stages: int, merged: Mapping[StagePair, MergedTasks]) -> tuple[tuple[float, ...], ...]:
    """What each pair hides, [forward stage][backward stage], as `schedule.Costs` takes it."""
    return tuple(
        tuple(merged[one, other].hidden if (one, other) in merged else 0.0 for other in range(stages))
        for one in range(stages)
    )
