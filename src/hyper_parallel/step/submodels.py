"""Submodels in a training loop of the user's own: parts of a model, each on its own devices with its own axes.

    parts = hp.submodels(
        model,
        {
            "vision": {"modules": ["model.vision_tower", "model.multi_modal_projector"], "devices": 1},
            "language": {"axes": {"tensor": 2}},
        },
        batch,
        micro_batches=8,
    )
    loss = parts.forward_backward(batches)

The model's code does not change: each device group captures the step of the whole model under its own axes and runs its
own part of the graph, and values that cross between the groups are cut and brought together as their axes say. With
L(x) the loss of a token,

    loss = Σ L / T,      T = valid tokens of all rows

so that gradients and loss are those of one device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.compat.process_groups import level_group_counts
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import DataError, StrategyError
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.runtime.rank_transfers import ProcessTransfers
from hyper_parallel.schedule import StepSchedule
from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.shard.loss import valid_tokens
from hyper_parallel.shard.model_structure import assigned_modules, submodel_of
from hyper_parallel.shard.process_mesh import PipelinePlace
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_micro_batch import ForwardOutputs, next_logits, summed_loss
from hyper_parallel.step.pipeline import device_of
from hyper_parallel.step.pipeline_build import check_processes, refuse_calls, shadow_of
from hyper_parallel.step.program_runner import Counts, ProgramRunner, gradients_added, whole_loss
from hyper_parallel.step.recipe import GradientRecipe
from hyper_parallel.step.stage_plan import StagePlan
from hyper_parallel.step.submodel_plan import Parts, SubmodelPlanner
from hyper_parallel.step.submodel_rows import Inputs, Kinds, Rows, StepRows, SubmodelRows
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.axes import Submodel, read_submodels

log = logging.getLogger(__name__)


def submodels(
    model: nn.Module,
    submodels: Mapping[str, Submodel | Mapping[str, Any]],
    batch: Rows,
    *,
    micro_batches: int,
    strategy: Strategy | None = None,
    inputs: Inputs = dict,
    seed: int = 0,
    loss: LossConfig | None = None,
    device: torch.device | str | None = None,
) -> Submodels:
    """Spread the submodels of `model` over the ranks, in the order of their declaration.

    Each rank keeps the parameters of its submodel; the others go to the meta device. The model may have values, equal
    on every rank, or be on the meta device: `init_weights` or `load_weights` then fill what this rank keeps.

    `batch`: all rows of a step, equal on every rank: ``input_ids`` and ``labels``, int64 [B, S], and what else the
    model takes; some of them need each submodel. Labels are shifted: the label at a position is the token after it, and
    -100 bears no loss. Ranks whose axes `replicate` and `shard` are above 1 compute a part of each micro-batch, whose
    rows must divide by their product.
    `inputs` makes the model's keyword arguments from rows, where they are not the same: patches of all images in one
    tensor, for one. `strategy`: what all submodels have in common (precision, memory.shard, memory.recompute); its axes
    are 1. `seed`: of dropout. `loss`: as `train.loss` of a run file. `device`: where the steps run; left out, where the
    model's values are, or the CPU.

    A collective. Raises StrategyError for submodels that overlap or leave weights out, that need each other's values,
    or that do not fit the ranks.
    """
    named = read_submodels(submodels)
    if micro_batches < 1:
        raise StrategyError(f"hp.submodels: micro_batches must be at least 1; got {micro_batches}")
    strategies = _strategies(named, strategy or Strategy())
    assigned = assigned_modules(model, named)
    groups = DeviceGroup.of_submodels(strategies)
    devices = ", ".join(f"{name} {one.axes.world}" for name, one in named.items())
    wanted = sum(one.axes.world for one in named.values())
    check_processes(wanted, f"the submodels have {wanted} devices ({devices})")
    rank = dist.get_rank()
    here = next(at for at, group in enumerate(groups) if rank in group.ranks)
    place = PipelinePlace(groups, here, submodels=True)
    pipelines = tuple(one.axes.pipeline for one in named.values())
    parts = Parts(tuple(named), pipelines, submodel_of(assigned))
    own = strategies[parts.names[parts.of_group(place.index)[0]]]
    where = torch.device(device) if device is not None else device_of(model)
    rows = SubmodelRows(batch, micro_batches, inputs, groups, place.index, where)
    shadow = shadow_of(model, "submodels")
    level_group_counts()
    parallelize(shadow, own, lowering="traceable", pipeline=place)
    recipe = GradientRecipe(shadow, sharded(shadow), seed=seed, loss=loss or LossConfig())
    # Copies of rows would count in the routers' auxiliary loss.
    rows.copies = recipe.handle.balancing is None
    planner = SubmodelPlanner(recipe, parts, where)
    # The rows with most are first.
    given = rows.arranged(batch)
    micro = rows.share(given, 0)
    first = planner.training(micro, rows.doubled(given, 0), micro_batches)
    parallelize(
        model,
        own,
        lowering="traceable",
        like=recipe.handle,
        pipeline=replace(place, owners=first.owners),
    )
    refuse_calls(model, "spread over submodels", "forward_backward of what hp.submodels returned")
    evaluation = LossConfig(chunk=(loss or LossConfig()).chunk)
    return Submodels(sharded(model), planner, first, micro, rows, micro_batches, evaluation)


def _strategies(named: Mapping[str, Submodel], base: Strategy) -> dict[str, Strategy]:
    """That of each submodel. Raises StrategyError for what `base` says and no submodel can have."""
    if base.axes.world > 1:
        raise StrategyError(
            f"hp.submodels: axes ({base.axes.product}) are those of each submodel; name them there"
        )
    if base.memory.device is not None:
        raise StrategyError("hp.submodels: memory.device is not supported beside submodels; leave it out")
    if base.expert_balance is not None:
        raise StrategyError(
            "hp.submodels: expert_balance is not supported beside submodels; leave it out, or name hot experts in "
            "expert_replicas"
        )
    common = base.model_dump()
    return {name: Strategy.model_validate({**common, "axes": one.axes}) for name, one in named.items()}


class Submodels:
    """A model whose parts run on devices of their own, and the passes over its micro-batches."""

    def __init__(
        self,
        handle: ShardedModel,
        planner: SubmodelPlanner,
        first: StagePlan,
        like: MicroBatch,
        rows: SubmodelRows,
        micro_batches: int,
        evaluation: LossConfig,
    ) -> None:
        """`first`: the plan of micro-batches like `like`, which needs all submodels; `evaluation`: the loss of held-out
        rows."""
        self.handle, self._planner, self._rows, self._count = handle, planner, rows, micro_batches
        self._first = first
        self._said = False
        self.runner = ProgramRunner(handle, first, ProcessTransfers(handle.rank))
        lead, forget = handle.rank == 0, self.runner.forget
        self._training = Kinds(self._to_train, forget, lead)
        self._training.add(first, like)
        self._evaluating = Kinds(partial(self._of_forward, summed_loss(evaluation)), forget, lead)
        self._sampling = Kinds(partial(self._of_forward, next_logits), forget, lead)

    @property
    def plan(self) -> str:
        """The submodels, their ranks, and what crosses between them, a line each."""
        groups = self._planner.place.groups
        lines = [f"{group.name}: ranks {', '.join(map(str, group.ranks))}" for group in groups]
        return "\n".join([*lines, *self._first.described])

    @property
    def schedule(self) -> StepSchedule | None:
        """The order of the last step's passes, None before it. Its times are those by which it was made: a number for
        the FLOPs and bytes of each stage, with transfers left out."""
        return self.runner.last

    def forward_backward(
        self, batch: Rows, *, step: int = 0, tokens: float | None = None, arrange: bool = True
    ) -> Tensor:
        """Run the forward and backward passes of a step; its loss, fp32 [], the same number on every rank.

        `batch`: all rows of the step, equal on every rank, with the names and shapes that `submodels` was given. What
        `inputs` makes of them may differ from micro-batch to micro-batch (images, or none): a kind that is new is
        planned, and the step's order is made from what its micro-batches cost. Afterwards ``parameter.grad`` of every
        parameter that this rank holds has the gradient of the whole step added to it, zeros where no row needs the
        submodel; `hp.sharded(model).grad_norm()` and `clip` are over all submodels.

        `tokens`: what the sum of losses is divided by; left out, the valid tokens of the batch. Dropout is a function
        of `step`, its number. `arrange`: rows for which `inputs` makes as much are put into the same micro-batches, and
        dealt to the data ranks, which changes neither loss nor gradients; where their numbers do not divide by those of
        the ranks, some are computed once more without loss.

        A collective. Raises DataError for rows of other shapes or without loss, and StrategyError where the submodels
        cannot compute them.
        """
        problem = self._rows.problem(batch)
        if problem is not None:
            raise DataError(problem)
        handle = self.handle
        count = float(valid_tokens(batch["labels"])) if tokens is None else tokens
        if not count:
            raise DataError("no token of the rows bears loss; check that labels are not all -100")
        rows = self._rows.arranged(batch) if arrange else StepRows.as_given(batch)
        self._say(rows)
        micro = self._rows.shares(rows)
        divisor = torch.tensor(count, device=handle.device)
        counts, ordered = _in_order(self._training.sorted(rows, micro), micro)
        with gradients_added(handle):
            loss = self.runner.train(counts, StepBatch(step, [], ordered, divisor), divisor)
        return whole_loss(handle, loss)

    def evaluate(self, batch: Rows, *, tokens: float | None = None, arrange: bool = True) -> Tensor:
        """The mean loss of a valid token of held-out rows, without dropout; fp32 [], the same number on every rank.

        Arguments as of `forward_backward`; rows may have another length. NaN where no token bears loss and no `tokens`
        are given. A collective. Raises as `forward_backward` does.
        """
        problem = self._rows.problem(batch, lengths=False)
        if problem is not None:
            raise DataError(problem)
        count = float(valid_tokens(batch["labels"])) if tokens is None else tokens
        rows = self._rows.arranged(batch) if arrange else StepRows.as_given(batch)
        micro = self._rows.shares(rows)
        counts, ordered = _in_order(self._evaluating.sorted(rows, micro), micro)
        whole = whole_loss(self.handle, self.runner.evaluate(counts, ordered))
        return whole / count if count else whole * math.nan

    def next_logits(self, row: Rows) -> Tensor:
        """The logits of the token behind the place ``row["place"]``, int64 [1], of one row; fp32 [V], on every rank.

        `inputs` makes ``place`` of it too, as it is. A collective. Raises StrategyError as `forward_backward` does.
        """
        copies = self._rows.of_micro_batch
        rows = StepRows.as_given({name: torch.cat([one] * copies) for name, one in row.items()})
        micro = self._rows.share(rows, 0)
        [plan] = self._sampling.sorted(rows, [micro])
        return self.runner.next_logits(plan, micro)

    def _say(self, rows: StepRows) -> None:
        """Say once where many rows are computed in vain."""
        if self._said or self.handle.rank or rows.copies * 4 <= len(rows.numbers):
            return
        self._said = True
        log.warning(
            "%d of the %d rows of a step are copies without loss: where replicate or shard are above 1, each of these "
            "ranks needs as many images (or as much sound) as the others, and the rows have other numbers or sizes; "
            "pad them to few sizes, give larger batches, or use tensor in the place of replicate and shard",
            rows.copies,
            len(rows.numbers),
        )

    def _to_train(self, batch: StepRows, micro: MicroBatch, at: int) -> StagePlan:
        return self._checked(self._planner.training(micro, self._rows.doubled(batch, at), self._count), at)

    def _of_forward(self, outputs: ForwardOutputs, batch: StepRows, micro: MicroBatch, at: int) -> StagePlan:
        doubled = self._rows.doubled(batch, at)
        return self._checked(self._planner.forward(micro, doubled, outputs), at)

    def _checked(self, plan: StagePlan, at: int) -> StagePlan:
        """Raise StrategyError for a plan that needs weights where they are not."""
        for name, holders in plan.owners.items():
            if not {*holders} <= {*self._first.owners.get(name, ())}:
                raise StrategyError(
                    f"micro-batch {at}: other submodels than before use {name}; give hp.submodels a batch that needs "
                    "all of them"
                )
        return plan


def _in_order(
    kinds: Mapping[StagePlan, list[int]], micro: Sequence[MicroBatch]
) -> tuple[Counts, list[MicroBatch]]:
    """How many micro-batches there are of each kind, and the micro-batches kind by kind."""
    counts = tuple((plan, len(places)) for plan, places in kinds.items())
    return counts, [micro[at] for places in kinds.values() for at in places]
