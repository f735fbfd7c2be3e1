"""Builds a run's pipeline: the plan, and the model with the parameters of this rank's stages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.config import RunConfig
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.shard.model_structure import without_values
from hyper_parallel.shard.pipeline_place import PipelinePlace
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.engine import check_length
from hyper_parallel.step.pipeline_plan import MicroBatchShape, PipelinePlan, PipelinePlanner
from hyper_parallel.step.pipeline_runner import PipelineRunner, peers_of
from hyper_parallel.step.recipe import Recipe

log = logging.getLogger(__name__)


class BuiltPipeline:
    """A run's pipeline on one rank: planned, and made ready to run when it is first used."""

    def __init__(
        self, planner: PipelinePlanner, plan: PipelinePlan, shape: MicroBatchShape, loss: LossConfig
    ) -> None:
        """`loss`: of evaluations."""
        self._planner, self.plan, self._shape, self._loss = planner, plan, shape, loss
        self._handle: ShardedModel | None = None
        self._training: PipelineRunner | None = None
        self._evaluation: tuple[int, PipelineRunner] | None = None

    def runs(self, handle: ShardedModel) -> None:
        """The model that is run, which has its values before the first step. A collective."""
        self._handle = handle
        self._peers = peers_of(self.plan, handle)

    def train(self, batch: StepBatch, tokens: Tensor) -> Tensor:
        """As `PipelineRunner.train`."""
        if self._training is None:
            assert self._handle is not None, "the model was built"
            self._training = PipelineRunner(self.plan, self._handle, self._peers)
        return self._training.train(batch, tokens)

    def evaluate(self, micro: Sequence[MicroBatch]) -> Tensor:
        """As `PipelineRunner.evaluate`."""
        if self._evaluation is None or self._evaluation[0] != len(micro):
            assert self._handle is not None, "the model was built"
            shape = replace(self._shape, count=len(micro))
            plan = self._planner.evaluation(self.plan, shape, self._loss)
            self._evaluation = len(micro), PipelineRunner(plan, self._handle, {})
        return self._evaluation[1].evaluate(micro)


def build_pipeline(
    config: RunConfig, model: nn.Module, documents: bool, device: torch.device | str
) -> BuiltPipeline:
    """Plan the run's pipeline, and parallelize the model, of which this rank keeps its stages' parameters.

    `documents`: rows may hold several.

    Every rank comes to the same plan. Raises StrategyError for a pipeline that cannot be cut, or does not fit.
    """
    strategy = config.effective_strategy
    place = PipelinePlace.of(strategy, dist.get_rank())
    assert place is not None, "the strategy has a pipeline"
    try:
        shadow = without_values(model)
    # A module of the user's may hold what cannot be copied.
    except Exception as error:
        raise StrategyError(
            f"axes.pipeline: stages are cut from a copy of the model, and it cannot be copied: {error}"
        ) from error
    parallelize(shadow, strategy, lowering="traceable", pipeline=place)
    handle = sharded(shadow)
    check_length(handle, config)
    planner = PipelinePlanner(Recipe.of(config, shadow), strategy, device, _of_first_rank)
    share = config.train.batch // strategy.axes.data
    shape = MicroBatchShape(config.micro_batch, config.data.sequence, share // config.micro_batch, documents)
    plan = planner.training(shape)
    if place.index == 0:
        log.info("%s", plan.described())
    parallelize(
        model, strategy, lowering="traceable", like=handle, pipeline=replace(place, owners=plan.owners)
    )
    built = BuiltPipeline(planner, plan, shape, LossConfig(chunk=config.train.loss.chunk))
    built.runs(sharded(model))
    return built


def _of_first_rank(found: Any) -> Any:
    """What rank 0 has found. A collective."""
    told = [found]
    dist.broadcast_object_list(told, src=0)
    return told[0]
