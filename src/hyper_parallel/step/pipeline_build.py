"""Builds a run's pipeline: the plan, and the model with the parameters of this rank's stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.config import RunConfig
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.runtime.rank_transfers import ProcessTransfers, Transfers
from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.shard.hooks import wrap
from hyper_parallel.shard.model_structure import without_values
from hyper_parallel.shard.plan.plan import check_length
from hyper_parallel.shard.process_mesh import PipelinePlace
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.pipeline_plan import MicroBatchShape, PipelinePlan, PipelinePlanner
from hyper_parallel.step.program_runner import PipelineRunner, peers_of
from hyper_parallel.step.recipe import GradientRecipe
from hyper_parallel.strategy import Strategy

log = logging.getLogger(__name__)

MOST_SHAPES = 16
"""Shapes of batches whose plans are cached, of training and of evaluation; the least recently used one leaves."""


@dataclass(frozen=True)
class Losses:
    """The losses of training steps and of held-out rows."""

    training: LossConfig
    evaluation: LossConfig
    seed: int = 0
    """Of random numbers."""


MakeTransfers = Callable[[int], Transfers]
"""A rank to its transfers."""


class BuiltPipeline:
    """A run's pipeline on one rank: planned for the first shape, and for others when they come.

    Every rank must ask for the same shapes in the same order.
    """

    def __init__(
        self,
        planner: PipelinePlanner,
        plan: PipelinePlan,
        shape: MicroBatchShape,
        loss: LossConfig,
        transfers: MakeTransfers = ProcessTransfers,
    ) -> None:
        """`loss`: of evaluations; `transfers`: of a rank."""
        self._planner, self.plan, self.shape, self._loss = planner, plan, shape, loss
        self._transfers = transfers
        self.peers: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """As of `peers_of`, once there is a model that runs."""
        self._handle: ShardedModel | None = None
        self._runners: dict[tuple[bool, MicroBatchShape], PipelineRunner] = {}
        self._warned = False

    def runs(self, handle: ShardedModel) -> None:
        """The model that is run, which has its values before the first step. A collective."""
        self._handle = handle
        self.peers = peers_of(self.plan, handle)

    def train(self, batch: StepBatch, tokens: Tensor, documents: bool | None = None) -> Tensor:
        """As `PipelineRunner.train`. `documents`: rows may hold several; left out, as the first plan has it."""
        return self._runner(True, batch.micro, documents).train(batch, tokens)

    def evaluate(self, micro: Sequence[MicroBatch], documents: bool | None = None) -> Tensor:
        """As `PipelineRunner.evaluate`. `documents`: as of `train`."""
        return self._runner(False, micro, documents).evaluate(micro)

    def _runner(self, trains: bool, micro: Sequence[MicroBatch], documents: bool | None) -> PipelineRunner:
        rows, length = micro[0].input_ids.shape
        several = self.shape.documents if documents is None else documents
        shape = MicroBatchShape(rows, length, len(micro), several)
        found = self._runners.pop((trains, shape), None)
        if found is None:
            found = self._made(trains, shape)
            if len(self._runners) == MOST_SHAPES:
                self._note_many()
                del self._runners[next(iter(self._runners))]
        self._runners[trains, shape] = found
        return found

    def _made(self, trains: bool, shape: MicroBatchShape) -> PipelineRunner:
        assert self._handle is not None, "the model was built"
        if not trains:
            plan = self._planner.evaluation(self.plan, shape, self._loss)
            return PipelineRunner(plan, self._handle, {}, self._transfers(self._handle.rank))
        return PipelineRunner(
            self.plan_of(shape), self._handle, self.peers, self._transfers(self._handle.rank)
        )

    def plan_of(self, shape: MicroBatchShape) -> PipelinePlan:
        """The plan of training steps of a shape, which is made anew where it is not the first one's. A collective."""
        return self.plan if shape == self.shape else self._planner.training(shape, self.plan)

    @property
    def shadow(self) -> GradientRecipe:
        """The model without values that the stages are cut from."""
        return self._planner.shadow

    @property
    def place(self) -> PipelinePlace:
        """This rank's, before the model is cut."""
        return self._planner.place

    def _note_many(self) -> None:
        place = self._planner.place
        if not self._warned and self._handle is not None and self._handle.rank == place.groups[0].ranks[0]:
            log.warning(
                "batches of more than %d shapes so far, and the pipeline is planned for each: pad rows to few lengths",
                MOST_SHAPES,
            )
        self._warned = True


def build_pipeline(
    config: RunConfig,
    model: nn.Module,
    documents: bool,
    device: torch.device | str,
    transfers: MakeTransfers = ProcessTransfers,
) -> BuiltPipeline:
    """Plan the run's pipeline, and parallelize the model, of which this rank keeps its stages' parameters.

    `documents`: rows may hold several. `transfers`: makes those of a rank, between processes by default.

    Every rank comes to the same plan. Raises StrategyError for a pipeline that cannot be cut, or does not fit.
    """
    strategy, loss = config.effective_strategy, config.train.loss
    share = config.train.batch // strategy.axes.data
    shape = MicroBatchShape(config.micro_batch, config.data.sequence, share // config.micro_batch, documents)
    losses = Losses(loss, LossConfig(chunk=loss.chunk), config.seed)
    return cut_into_stages(model, strategy, shape, device, losses, transfers, length_key="data.sequence: ")


def cut_into_stages(
    model: nn.Module,
    strategy: Strategy,
    shape: MicroBatchShape,
    device: torch.device | str,
    losses: Losses,
    transfers: MakeTransfers = ProcessTransfers,
    *,
    length_key: str = "",
) -> BuiltPipeline:
    """Plan a pipeline for micro-batches of `shape`, and parallelize the model, as `build_pipeline` does.

    `length_key`: what an error about the length of rows begins with. A collective.
    """
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
    try:
        check_length(handle.plan, shape.length)
    except StrategyError as error:
        raise StrategyError(f"{length_key}{error}") from None
    planner = PipelinePlanner(
        GradientRecipe(shadow, handle, seed=losses.seed, loss=losses.training),
        strategy,
        device,
        _of_first_rank,
    )
    plan = planner.training(shape)
    if place.index == 0:
        log.info("%s", plan.described())
    parallelize(
        model, strategy, lowering="traceable", like=handle, pipeline=replace(place, owners=plan.owners)
    )
    wrap(model, _refuse_call)
    built = BuiltPipeline(planner, plan, shape, losses.evaluation, transfers)
    built.runs(sharded(model))
    return built


def _refuse_call(*args: Any, **kwargs: Any) -> NoReturn:
    raise StrategyError(
        "the model is cut into the stages of a pipeline, and no rank holds all of it; in place of calling it, give the "
        "rows of a step to forward_backward, or evaluate, of what hp.pipeline returned"
    )


def _of_first_rank(found: Any) -> Any:
    """What rank 0 has found. A collective."""
    told = [found]
    dist.broadcast_object_list(told, src=0)
    return told[0]
