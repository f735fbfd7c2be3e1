"""Runs a Program's instruction list on one rank, and the graphs that run once a step before and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.compat import is_out_of_memory
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import HyperParallelError, OutOfMemoryError
from hyper_parallel.graph import Executable, StepGraph, executable
from hyper_parallel.graph.ir import Value, module_state
from hyper_parallel.graph.likeness import difference
from hyper_parallel.launch import logs
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.runtime.build_program import step_program
from hyper_parallel.runtime.interpreter import Interpreter, StepValues, summed
from hyper_parallel.runtime.rank_transfers import Transfers
from hyper_parallel.runtime.reshard_transfers import KnownPorts
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.schedule import StepSchedule, forward_only_kinds, step_schedule
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.sharded_model import ROW_AXES
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_micro_batch import batch_of, fields_of
from hyper_parallel.step.micro_batch import LOSS, ROWS
from hyper_parallel.step.out_of_memory import describe, head_of
from hyper_parallel.step.pipeline_gradients import (
    Arithmetic,
    gradient_value,
    reduced_gradients,
    shared_gradients,
)
from hyper_parallel.step.pipeline_plan import PipelinePlan
from hyper_parallel.step.submodel_plan import SubmodelPlan

T = TypeVar("T")


class OncePerStep:
    """What a rank's stages have before the first micro-batch and after the last one."""

    def __init__(self, gather: StepGraph | None, reduce: StepGraph | None) -> None:
        """`gather`, `reduce`: as `PipelineStages` makes them of this rank's stages."""
        self.gather, self.reduce = gather, reduce
        self._gathers, reduces = _ready(gather), _ready(reduce)
        self._arithmetic = Arithmetic[Tensor](
            lambda _, given: {} if reduces is None else reduces.run(given), torch.add, zeros
        )

    def weights(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those that are the same in all micro-batches, by the names of the stages' inputs."""
        return {} if self._gathers is None else self._gathers.run(state)

    def gradients(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by parameter from the sums over the micro-batches."""
        return reduced_gradients(sums, self.reduce, self._arithmetic)


def located(
    handle: ShardedModel,
    interpreter: Interpreter,
    state: Mapping[str, Tensor],
    when: str,
    runs: Callable[[], T],
) -> T:
    """What `runs` gives, which runs the schedule of `interpreter`. Errors name `when`, the stage, the micro-batch and
    the instruction; that of memory says what filled it."""
    try:
        # Under a budget they may be elsewhere between steps, in which they are the graph's.
        with present(*state.values()), pulse.schedule(interpreter.positions):
            return runs()
    except HyperParallelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise _out_of_memory(handle, interpreter, when, error) from error
        raise


def _out_of_memory(
    handle: ShardedModel, interpreter: Interpreter, when: str, error: Exception
) -> OutOfMemoryError:
    at = f"{when}, {pulse.position()}"
    found = interpreter.failed_node(error)
    if found is None:
        return OutOfMemoryError(f"{at}: out of memory outside of the stage's graph: {error}")
    described = describe(*found, handle.strategy, head_of(handle.model))
    return OutOfMemoryError(
        f"{at}: out of memory {described}; these are of one micro-batch, and {interpreter.in_flight} were in "
        "flight on this rank, of each of which a part is kept"
    )


def _ready(step: StepGraph | None) -> Executable | None:
    return None if step is None else executable(step)


def zeros(like: Value) -> Tensor:
    """A tensor of 0."""
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()


class PipelineRunner:
    """This rank's part of a pipeline, step after step. Every rank makes one, and calls the same methods."""

    def __init__(
        self,
        plan: PipelinePlan,
        handle: ShardedModel,
        peers: Mapping[tuple[int, ...], dist.ProcessGroup],
        transfers: Transfers,
    ) -> None:
        """The model has its values; those of other stages are on the meta device. `peers`: as of `peers_of`. A
        collective."""
        place = handle.pipeline
        assert place is not None, "the model was parallelized for a pipeline"
        self._plan, self._handle = plan, handle
        mine = [stage for stage, index in enumerate(plan.schedule.placement) if index == place.index]
        self._state = {
            name: given.tensor.detach()
            for name, given in module_state(handle.model).items()
            if place.index in plan.owners.get(name.partition(".")[2], ())
        }
        self._interpreter = Interpreter(
            plan.program,
            plan.stages.partition,
            self._state,
            handle.rank,
            transfers,
            pulse.instruction,
            plan.turns,
        )
        self._interpreter.compare()
        self._once = OncePerStep(plan.stages.gather(mine), plan.stages.reduce(mine))
        self._shared, self._peers = shared_gradients(plan.stages, plan.owners), peers

    def train(self, batch: StepBatch, tokens: Tensor) -> Tensor:
        """Give each of this rank's parameters its gradient of the whole batch; this rank's part of the loss.

        `tokens`: valid ones of the step over all ranks, fp32 []. The loss is fp32 [], 0 but in the last stage.
        """
        step = torch.tensor(batch.step, device=tokens.device)
        with logs.at(batch.step + 1, where=pulse.position):
            found = self._run(
                f"step {batch.step + 1}",
                [batch_of(micro, step, tokens) for micro in batch.micro],
            )
        gradients = self._reduced(found.gradients)
        for one in self._handle.owned():
            if one.parameter.requires_grad:
                one.parameter.grad = gradients.get(one.name)
        routing = self._handle.routing
        if routing is not None:
            counts = {k.removeprefix(ROWS): v for k, v in found.totals.items() if k.startswith(ROWS)}
            routing.counts.update(counts)
        return found.totals.get(LOSS, torch.zeros((), device=tokens.device))

    def evaluate(self, micro: Sequence[MicroBatch]) -> Tensor:
        """The sum of this rank's tokens' losses, fp32 []: 0 but in the last stage."""
        found = self._run("evaluation", [fields_of(one) for one in micro])
        return found.totals.get(LOSS, torch.zeros((), device=self._handle.device))

    def _run(self, when: str, batches: Sequence[Mapping[str, Tensor]]) -> StepValues:
        """Run the schedule. Errors name `when`, the stage, the micro-batch and the instruction."""
        runs = self._interpreter
        return located(
            self._handle,
            runs,
            self._state,
            when,
            lambda: runs.run(batches, self._once.weights(self._state), when),
        )

    def _reduced(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of this rank's parameters from what its stages' micro-batches add up to."""
        found = self._once.gradients(sums)
        for name, holders in self._shared.items():
            group = self._peers.get(holders)
            if group is not None:
                if name not in found:
                    # Another holder's stages compute the whole gradient.
                    found[name] = zeros(gradient_value(self._plan, name))
                dist.all_reduce(found[name], group=group)
        return found


def peers_of(plan: PipelinePlan, handle: ShardedModel) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The process groups of this rank in which gradients of shared parameters are summed, by the indices of the device
    groups that hold them: of the ranks at this rank's place. A collective, right behind the making of the stages' own
    process groups.

    Torch names a process group by its ranks and by how many groups the process has. So every rank makes as many, one
    with itself alone in place of each group that it is not in: with another number, groups would have other names on
    other ranks, which then wait for each other for ever.
    """
    place = handle.pipeline
    assert place is not None
    here = place.devices.place(handle.rank)
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for holders in sorted(set(shared_gradients(plan.stages, plan.owners).values())):
        holds = place.index in holders
        ranks = sorted(place.groups[index].ranks[here] for index in holders) if holds else [handle.rank]
        group: dist.ProcessGroup | None = dist.new_group(ranks, use_local_synchronization=True)
        if group is None:
            raise HyperParallelError(f"rank {handle.rank} is not one of the ranks {ranks} that share weights")
        if holds:
            found[holders] = group
    return found


# Runs steps of submodels on one rank, whose micro-batches are of one kind or of several, as one Program.
#
# A step's order is made from the costs of the kinds that it has (`schedule.step_schedule`), and kept for the next step
# with as many of each. Kinds whose graphs before and after the micro-batches are equal, as most are, run these once for
# all of them, and add their gradients to the same tensors.

MOST_ORDERS = 64
"""Programs that are kept."""

Counts = tuple[tuple[SubmodelPlan, int], ...]
"""The kinds of a step's micro-batches, and how many there are of each."""


class SubmodelRunner:
    """This rank's part of the steps of a run. Every rank makes one, and calls the same methods."""

    def __init__(
        self, handle: ShardedModel, owners: Mapping[str, tuple[int, ...]], transfers: Transfers
    ) -> None:
        """The model has its values; those of other submodels are on the meta device. `owners`: as of `SubmodelPlan`."""
        place = handle.pipeline
        assert place is not None, "the model was spread over device groups"
        self._handle, self._place, self._transfers = handle, place, transfers
        self._state = {
            name: given.tensor.detach()
            for name, given in module_state(handle.model).items()
            if place.index in owners.get(name.partition(".")[2], ())
        }
        same = tuple(axis for axis in handle.mesh.names if axis not in ROW_AXES)
        copies = any(handle.mesh.size(axis) > 1 for axis in same)
        self._ports = KnownPorts((lambda told: handle.all_reduce(told, same, "max")) if copies else None)
        self._kinds: dict[SubmodelPlan, _Kind] = {}
        self._orders: dict[Counts, tuple[StepSchedule | None, Interpreter]] = {}
        self.last: StepSchedule | None = None
        """Of the last training step."""

    def forget(self, kinds: Sequence[SubmodelPlan]) -> None:
        """Drop what is kept for kinds that come no more."""
        for plan in kinds:
            self._kinds.pop(plan, None)
        self._orders = {
            counts: one
            for counts, one in self._orders.items()
            if not any(plan in kinds for plan, _ in counts)
        }

    def train(self, counts: Counts, batch: StepBatch, tokens: Tensor) -> Tensor:
        """Give each of this rank's parameters its gradient of the whole batch; this rank's part of the loss, fp32 [].

        `batch`: its micro-batches in the order of `counts`. `tokens`: as of `PipelineRunner.train`. A collective.
        """
        step = torch.tensor(batch.step, device=tokens.device)
        with logs.at(batch.step + 1, where=pulse.position):
            inputs = [batch_of(micro, step, tokens) for micro in batch.micro]
            kinds, self.last = self._run(counts, f"step {batch.step + 1}", inputs)
        sums = {kind.once: kind.sums for kind in kinds}
        gradients = summed(once.gradients(found) for once, found in sums.items())
        for one in self._handle.owned():
            if one.parameter.requires_grad:
                one.parameter.grad = gradients.get(one.name)
        return self._loss(kinds)

    def evaluate(self, counts: Counts, micro: Sequence[MicroBatch]) -> Tensor:
        """The sum of the losses of this rank's tokens, fp32 []. `counts`: of plans without backward passes."""
        kinds, _ = self._run(counts, "evaluation", [fields_of(one) for one in micro])
        return self._loss(kinds)

    def _run(
        self, counts: Counts, when: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> tuple[list[_Kind], StepSchedule | None]:
        """Run micro-batches; errors name `when`."""
        kinds = [self._kind(plan) for plan, _ in counts]
        found, runs = self._order(counts)

        def run() -> None:
            self._begin(kinds)
            runs.go_on(inputs, when)

        located(self._handle, runs, self._state, when, run)
        return kinds, found

    def _loss(self, kinds: Sequence[_Kind]) -> Tensor:
        totals = summed(runner.totals for kind in kinds for runner in kind.runners.values())
        return totals.get(LOSS, torch.zeros((), device=self._handle.device))

    def _begin(self, kinds: Sequence[_Kind]) -> None:
        """Give every stage the weights of this step, and where to add its gradients."""
        weights = {kind.once: kind.once.weights(self._state) for kind in kinds}
        sums: dict[OncePerStep, dict[str, Tensor]] = {once: {} for once in weights}
        for kind in self._kinds.values():
            # Those without a micro-batch in this step let go of what they had.
            kind.sums = sums[kind.once] if kind in kinds else {}
            for runner in kind.runners.values():
                runner.begin(weights[kind.once] if kind in kinds else {}, kind.sums)

    def _kind(self, plan: SubmodelPlan) -> _Kind:
        if plan not in self._kinds:
            mine = [stage for stage, group in enumerate(plan.placement) if group == self._place.index]
            cut = plan.stages.partition.stages
            gather, reduce = plan.stages.gather(mine), plan.stages.reduce(mine)
            known = (kind.once for kind in self._kinds.values())
            once = next(
                (one for one in known if _same(one.gather, gather) and _same(one.reduce, reduce)), None
            )
            runners = {stage: StageRunner(cut[stage], self._state) for stage in mine}
            self._kinds[plan] = _Kind(runners, once or OncePerStep(gather, reduce), {})
        return self._kinds[plan]

    def _order(self, counts: Counts) -> tuple[StepSchedule | None, Interpreter]:
        if counts in self._orders:
            # The one that was used last comes last.
            self._orders[counts] = self._orders.pop(counts)
            return self._orders[counts]
        groups = self._place.groups
        priced = [plan.priced(count) for plan, count in counts]
        trains = all(plan.trains for plan, _ in counts)
        found = step_schedule(priced, len(groups)) if trains else None
        order = forward_only_kinds(priced, len(groups)) if found is None else found.schedule
        program, stages = step_program([plan.in_program(count) for plan, count in counts], order, groups)
        runners: dict[int, StageRunner] = {}
        first = 0
        for plan, _ in counts:
            runners |= {first + stage: one for stage, one in self._kind(plan).runners.items()}
            first += len(plan.placement)
        made = Interpreter(
            program,
            stages,
            self._state,
            self._handle.rank,
            self._transfers,
            pulse.instruction,
            known=self._ports,
            runners=runners,
        )
        made.compare()
        self._orders[counts] = found, made
        if len(self._orders) > MOST_ORDERS:
            del self._orders[next(iter(self._orders))]
        return self._orders[counts]


@dataclass(eq=False)
class _Kind:
    """This rank's stages of a kind of micro-batches."""

    runners: Mapping[int, StageRunner]
    """By stage of the kind."""
    once: OncePerStep
    """One object for all kinds that have it in common."""
    sums: dict[str, Tensor]
    """Of gradients over the micro-batches of this step, of all kinds with the same `once`."""


def _same(one: StepGraph | None, other: StepGraph | None) -> bool:
    if one is None or other is None:
        return one is other
    return difference(one, other) is None
