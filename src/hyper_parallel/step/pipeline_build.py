"""Builds a run's pipeline: the plan, and the model with the parameters of this rank's stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

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
from hyper_parallel.step.micro_batch import PLACE
from hyper_parallel.step.pipeline_plan import PipelinePlanner, StepShape
from hyper_parallel.step.program_runner import ProgramRunner
from hyper_parallel.step.recipe import GradientRecipe
from hyper_parallel.step.stage_plan import StagePlan
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


_Pass = Literal["training", "evaluation", "sampling"]


class BuiltPipeline:
    """A run's pipeline on one rank: planned for the first shape, and for others when they come.

    Every rank must ask for the same shapes in the same order.
    """

    def __init__(self, planner: PipelinePlanner, plan: StagePlan, shape: StepShape, loss: LossConfig) -> None:
        """`loss`: of evaluations."""
        self._planner, self.plan, self.shape, self._loss = planner, plan, shape, loss
        self._plans: dict[tuple[_Pass, StepShape], StagePlan] = {}
        self._warned = False

    def runs(self, handle: ShardedModel, transfers: Transfers) -> None:
        """The model that is run, which has its values before the first step. A collective."""
        self.handle, self.runner = handle, ProgramRunner(handle, self.plan, transfers)

    def train(self, batch: StepBatch, tokens: Tensor, documents: bool | None = None) -> Tensor:
        """As `ProgramRunner.train`. `documents`: rows may hold several; left out, as the first plan has it."""
        plan = self._plan("training", batch.micro, documents)
        return self.runner.train(((plan, len(batch.micro)),), batch, tokens)

    def evaluate(self, micro: Sequence[MicroBatch], documents: bool | None = None) -> Tensor:
        """As `ProgramRunner.evaluate`. `documents`: as of `train`."""
        return self.runner.evaluate(((self._plan("evaluation", micro, documents), len(micro)),), micro)

    def next_logits(self, ids: Sequence[int], place: int) -> Tensor:
        """The logits of the token behind a place of a row of one document, fp32 [V], on every rank. A collective."""
        device = self.handle.device
        row = torch.tensor([ids], device=device)
        positions, number = torch.arange(len(ids), device=device)[None], torch.zeros(1, dtype=torch.int64)
        extra = {PLACE: torch.tensor([place], device=device)}
        micro = MicroBatch(row, row, positions, number.to(device), several=False, extra=extra)
        return self.runner.next_logits(self._plan("sampling", [micro], False), micro)

    def _plan(self, kind: _Pass, micro: Sequence[MicroBatch], documents: bool | None) -> StagePlan:
        """The plan of micro-batches, which is kept while it is among those used last."""
        rows, length = micro[0].input_ids.shape
        several = self.shape.documents if documents is None else documents
        # An evaluation takes any number.
        shape = StepShape(rows, length, len(micro) if kind == "training" else 1, several)
        plan = self._plans.pop((kind, shape), None)
        if plan is None:
            if kind == "training":
                plan = self.plan_of(shape)
            elif kind == "evaluation":
                plan = self._planner.evaluation(self.plan, shape, self._loss)
            else:
                plan = self._planner.sampling(self.plan, shape)
            if len(self._plans) == MOST_SHAPES:
                self._note_many()
                self.runner.forget([self._plans.pop(next(iter(self._plans)))])
        self._plans[kind, shape] = plan
        return plan

    def plan_of(self, shape: StepShape) -> StagePlan:
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
        if not self._warned and self.handle.rank == self.place.groups[0].ranks[0]:
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
    shape = StepShape(config.micro_batch, config.data.sequence, share // config.micro_batch, documents)
    losses = Losses(loss, LossConfig(chunk=loss.chunk), config.seed)
    return cut_into_stages(model, strategy, shape, device, losses, transfers, length_key="data.sequence: ")


def cut_into_stages(
    model: nn.Module,
    strategy: Strategy,
    shape: StepShape,
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
    shadow = shadow_of(model, "axes.pipeline: stages")
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
        log.info("%s", *plan.described)
    parallelize(
        model, strategy, lowering="traceable", like=handle, pipeline=replace(place, owners=plan.owners)
    )
    refuse_calls(
        model,
        "cut into the stages of a pipeline",
        "forward_backward, or evaluate, of what hp.pipeline returned",
    )
    built = BuiltPipeline(planner, plan, shape, losses.evaluation)
    built.runs(sharded(model), transfers(handle.rank))
    return built


def shadow_of(model: nn.Module, parts: str) -> nn.Module:
    """A copy of the model without values. `parts`: what is cut from it. Raises StrategyError."""
    try:
        return without_values(model)
    # A module of the user's may hold what cannot be copied.
    except Exception as error:
        raise StrategyError(
            f"{parts} are cut from a copy of the model, and it cannot be copied: {error}"
        ) from error


def refuse_calls(model: nn.Module, spread: str, instead: str) -> None:
    """Have calls of the model raise StrategyError, since it is `spread` over ranks; `instead` takes its rows."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise StrategyError(
            f"the model is {spread}, and no rank holds all of it; in place of calling it, give the rows of a step to "
            f"{instead}"
        )

    wrap(model, refuse)


def check_processes(wanted: int, needed: str) -> None:
    """Raise StrategyError unless there are as many processes as are `needed`, in words."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world != wanted:
        raise StrategyError(
            f"{needed}, and there {'is 1 process' if world == 1 else f'are {world} processes'}; start {wanted} "
            f"(torchrun --nproc-per-node {wanted} …) and call init_process_group first"
        )


def _of_first_rank(found: Any) -> Any:
    """What rank 0 has found. A collective."""
    told = [found]
    dist.broadcast_object_list(told, src=0)
    return told[0]
