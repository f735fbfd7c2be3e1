"""Runs the steps of a Program on one rank: the graphs before the first micro-batch, the instruction list, and the
graphs and sums of gradients after the last one.

The order of a step is given (a pipeline's), or made from the costs of the kinds of micro-batches that it has
(`schedule.step_schedule`), and kept for the next step with as many of each. Kinds whose graphs before and after the
micro-batches are equal, as most are, run these once for all of them, and add their gradients to the same tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from hyper_parallel.compat import is_out_of_memory
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import CompileError, HyperParallelError, OutOfMemoryError
from hyper_parallel.graph import Executable, StepGraph, executable
from hyper_parallel.graph.compiled import Compiled, compiled, is_compiled
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.ir import Value, module_state
from hyper_parallel.graph.likeness import difference
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.launch import logs
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.runtime.build_program import step_program
from hyper_parallel.runtime.interpreter import Interpreter, summed
from hyper_parallel.runtime.rank_transfers import Transfers
from hyper_parallel.runtime.reshard_transfers import KnownPorts
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.schedule import StepSchedule, forward_only, step_schedule
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.process_mesh import LOSS_AXES, ROW_AXES
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_micro_batch import batch_of, fields_of
from hyper_parallel.step.graph_cache import (
    ELSEWHERE_UNCOMPILED,
    UNCOMPILED_ADVICE,
    code_failed,
    uncompiled_because,
)
from hyper_parallel.step.micro_batch import LOGITS, LOSS, ROWS
from hyper_parallel.step.out_of_memory import describe, head_of
from hyper_parallel.step.stage_gradients import Arithmetic, SharedGradients, reduced_gradients
from hyper_parallel.step.stage_plan import StagePlan

log = logging.getLogger(__name__)

MOST_ORDERS = 64
"""Programs that are kept."""

Counts = tuple[tuple[StagePlan, int], ...]
"""The kinds of a step's micro-batches, and how many there are of each."""


class ProgramRunner:
    """This rank's part of a run's steps. Every rank makes one, and calls the same methods."""

    def __init__(self, handle: ShardedModel, first: StagePlan, transfers: Transfers) -> None:
        """The model has its values before the first step; those of other stages are on the meta device. `first`: a
        plan that needs all of the model. A collective, right behind the making of the process groups of this rank's
        axes."""
        place = handle.pipeline
        assert place is not None, "the model was spread over device groups"
        self._handle, self._place, self._transfers = handle, place, transfers
        self._owners = first.owners
        outputs = first.stages.whole.outputs
        self._trained = {name.removeprefix(GRADIENT) for name in outputs if name.startswith(GRADIENT)}
        self.shared = SharedGradients(first.stages, first.owners, handle)
        same = tuple(axis for axis in handle.mesh.names if axis not in ROW_AXES)
        copies = any(handle.mesh.size(axis) > 1 for axis in same)
        self._ports = KnownPorts((lambda told: handle.all_reduce(told, same, "max")) if copies else None)
        self._kinds: dict[StagePlan, _Kind] = {}
        self._orders: dict[Counts, tuple[StepSchedule | None, Interpreter]] = {}
        self.last: StepSchedule | None = None
        """The order of the last training step; None where it is given."""
        self.artifacts: Path | None = None
        """The folder of what is compiled for the stages of training steps; None compiles nothing."""

    @cached_property
    def _state(self) -> dict[str, Tensor]:
        """Parameters of this rank's stages, and all buffers, which every rank has: an evaluation may use others."""
        return {
            name: given.tensor.detach()
            for name, given in module_state(self._handle.model).items()
            if name.startswith("buffer.") or self._place.index in self._owners.get(name.partition(".")[2], ())
        }

    def forget(self, kinds: Sequence[StagePlan]) -> None:
        """Drop what is kept for kinds that come no more."""
        for plan in kinds:
            self._kinds.pop(plan, None)
        self._orders = {
            counts: order
            for counts, order in self._orders.items()
            if not any(plan in kinds for plan, _ in counts)
        }

    def train(self, counts: Counts, batch: StepBatch, tokens: Tensor) -> Tensor:
        """Give each of this rank's parameters its gradient of the whole batch; this rank's part of the loss.

        `batch`: its micro-batches in the order of `counts`. `tokens`: valid ones of the step over all ranks, fp32 [].
        The loss is fp32 [], 0 but where the stage is that computes it. A collective.
        """
        step = torch.tensor(batch.step, device=tokens.device)
        with logs.at(batch.step + 1, where=pulse.position):
            inputs = [batch_of(micro, step, tokens) for micro in batch.micro]
            kinds, self.last = self._run(counts, f"step {batch.step + 1}", inputs)
        gradients = self._gradients(kinds)
        trained = [one for one in self._handle.owned() if one.parameter.requires_grad]
        for one in trained:
            one.parameter.grad = gradients.get(one.name)
        self.shared.add_up()
        for one in trained:
            if one.parameter.grad is None and one.name in self._trained:
                # No micro-batch of the step needs the submodel.
                one.parameter.grad = torch.zeros_like(one.parameter)
        totals = _totals(kinds)
        if self._handle.routing is not None:
            counted = {k.removeprefix(ROWS): v for k, v in totals.items() if k.startswith(ROWS)}
            self._handle.routing.counts.update(counted)
        return totals.get(LOSS, torch.zeros((), device=tokens.device))

    def evaluate(self, counts: Counts, micro: Sequence[MicroBatch]) -> Tensor:
        """The sum of the losses of this rank's tokens, fp32 []. `counts`: of plans without backward passes."""
        kinds, _ = self._run(counts, "evaluation", [fields_of(one) for one in micro])
        return _totals(kinds).get(LOSS, torch.zeros((), device=self._handle.device))

    def next_logits(self, plan: StagePlan, micro: MicroBatch) -> Tensor:
        """What `capture_micro_batch.next_logits` gives for `micro`, on every rank. A collective."""
        kinds, _ = self._run(((plan, 1),), "sample", [fields_of(micro)])
        logits = _totals(kinds).get(LOGITS)
        if logits is None or self._handle.rank != self._place.devices.ranks[0]:
            # Every rank of the group that computes them has the same ones.
            shape = plan.stages.whole.returned[LOGITS].meta["value"].shape
            logits = torch.zeros(shape, device=self._handle.device)
        return self._handle.over_all_ranks(logits)

    def _run(
        self, counts: Counts, when: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> tuple[list[_Kind], StepSchedule | None]:
        """Run micro-batches. Errors name `when`, the stage, the micro-batch and the instruction; that of memory says
        what filled it."""
        kinds = [self._kind(plan) for plan, _ in counts]
        found, runs = self._order(counts)
        try:
            # Under a budget they may be elsewhere between steps, in which they are the graph's.
            with present(*self._state.values()), pulse.schedule(runs.positions):
                self._begin(kinds)
                runs.run(inputs, when)
        except HyperParallelError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(runs, when, error) from error
            failed = runs.failed_node(error)
            if failed is not None and is_compiled(failed[1]):
                why = code_failed(failed[1], f"{when}, {pulse.position()}", error)
                raise CompileError(f"{why}. {UNCOMPILED_ADVICE}") from error
            raise
        return kinds, found

    def _out_of_memory(self, runs: Interpreter, when: str, error: Exception) -> OutOfMemoryError:
        at = f"{when}, {pulse.position()}"
        found = runs.failed_node(error)
        if found is None:
            return OutOfMemoryError(f"{at}: out of memory outside of the stage's graph: {error}")
        described = describe(*found, self._handle.strategy, head_of(self._handle.model))
        return OutOfMemoryError(
            f"{at}: out of memory {described}; these are of one micro-batch, and {runs.in_flight} were in flight on "
            "this rank, of each of which a part is kept"
        )

    def _begin(self, kinds: Sequence[_Kind]) -> None:
        """Give every stage the weights of this step, and where to add its gradients: each stage that a rank has of a
        kind adds to tensors of its own."""
        for kind in self._kinds.values():
            # Let go of what the last step had, before this one's weights are gathered.
            kind.sums = []
            for runner in kind.runners.values():
                runner.begin({})
        weights = {once: once.weights(self._state) for once in dict.fromkeys(kind.once for kind in kinds)}
        sums: dict[OncePerStep, list[dict[str, Tensor]]] = {once: [] for once in weights}
        for kind in kinds:
            kind.sums = sums[kind.once]
            for at, runner in enumerate(kind.runners.values()):
                if at == len(kind.sums):
                    kind.sums.append({})
                runner.begin(weights[kind.once], kind.sums[at])

    def _gradients(self, kinds: Sequence[_Kind]) -> dict[str, Tensor]:
        """Gradients of this rank's parameters from what the micro-batches in its stages add up to."""
        sums = {kind.once: kind.sums for kind in kinds}
        return summed(once.gradients(summed(parts)) for once, parts in sums.items())

    def _kind(self, plan: StagePlan) -> _Kind:
        if plan not in self._kinds:
            mine = [stage for stage, group in enumerate(plan.placement) if group == self._place.index]
            gather, reduce = plan.stages.gather(mine), plan.stages.reduce(mine)
            known = (kind.once for kind in self._kinds.values())
            once = next(
                (one for one in known if _same(one.gather, gather) and _same(one.reduce, reduce)), None
            )
            paired = {stage for pair in plan.turns for stage in pair}
            stages = [plan.stages.partition.stages[stage] for stage in mine]
            # Held-out losses are those of the model's own operators, as elsewhere.
            if plan.trains and self.artifacts is not None:
                stages = self._compiled(stages, self.artifacts)
            runners = {
                stage.number: StageRunner(stage, self._state, pauses=stage.number in paired)
                for stage in stages
            }
            self._kinds[plan] = _Kind(runners, once or OncePerStep(gather, reduce), [])
        return self._kinds[plan]

    def _compiled(self, stages: list[Stage], artifacts: Path) -> list[Stage]:
        """The stages with their layers compiled, on all ranks or none. A collective."""
        made: list[Compiled] = []
        why: str | None = None
        with pulse.operation("compiling the stages"):
            try:
                made = [compiled(stage.step, artifacts) for stage in stages]
            except CompileError as error:
                log.debug("the stages could not be compiled", exc_info=True)
                why = str(error)
            failed = torch.tensor(float(why is not None), device=self._handle.device)
            refused = self._handle.over_all_ranks(failed, "max").item() > 0
        if refused:
            self.artifacts = None
            log.warning("%s", uncompiled_because(why or ELSEWHERE_UNCOMPILED))
            return stages
        for one in made:
            log.info("%s", one)
        return [replace(stage, step=one.step) for stage, one in zip(stages, made, strict=True)]

    def _order(self, counts: Counts) -> tuple[StepSchedule | None, Interpreter]:
        # The one that was used last comes last.
        self._orders[counts] = self._orders.pop(counts) if counts in self._orders else self._ordered(counts)
        if len(self._orders) > MOST_ORDERS:
            del self._orders[next(iter(self._orders))]
        return self._orders[counts]

    def _ordered(self, counts: Counts) -> tuple[StepSchedule | None, Interpreter]:
        groups, found = self._place.groups, None
        given, _ = counts[0]
        if given.program is not None:
            program, stages = given.program, given.stages.partition
        else:
            if all(plan.trains for plan, _ in counts):
                found = step_schedule([plan.priced(count) for plan, count in counts], len(groups))
                order = found.schedule
            else:
                order = forward_only([(plan.placement, count) for plan, count in counts], len(groups))
            program, stages = step_program([plan.in_program(count) for plan, count in counts], order, groups)
        runners: dict[int, StageRunner] = {}
        first = 0
        for plan, _ in counts:
            runners |= {first + stage: one for stage, one in self._kind(plan).runners.items()}
            first += len(plan.placement)
        made = Interpreter(
            program,
            stages,
            self._handle.rank,
            self._transfers,
            self._handle.device,
            runners,
            pulse.instruction,
            given.turns,
            self._ports,
        )
        made.compare()
        return found, made


@dataclass(eq=False)
class _Kind:
    """This rank's stages of a kind of micro-batches."""

    runners: Mapping[int, StageRunner]
    """By stage of the kind."""
    once: OncePerStep
    """One object for all kinds that have it in common."""
    sums: list[dict[str, Tensor]]
    """Of gradients over the micro-batches of this step, by place among the stages of this rank, of all kinds with the
    same `once`."""


def _totals(kinds: Sequence[_Kind]) -> dict[str, Tensor]:
    return summed(runner.totals for kind in kinds for runner in kind.runners.values())


class OncePerStep:
    """What a rank's stages have before the first micro-batch and after the last one."""

    def __init__(self, gather: StepGraph | None, reduce: StepGraph | None) -> None:
        """`gather`, `reduce`: as `PipelineStages` makes them of this rank's stages."""
        self.gather, self.reduce = gather, reduce
        self._gathers: Executable | None = None if gather is None else executable(gather)
        reduces = None if reduce is None else executable(reduce)
        self._arithmetic = Arithmetic[Tensor](
            lambda _, given: {} if reduces is None else reduces.run(given), torch.add, _zeros
        )

    def weights(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those that are the same in all micro-batches, by the names of the stages' inputs."""
        return {} if self._gathers is None else self._gathers.run(state)

    def gradients(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by parameter from the sums over the micro-batches."""
        return reduced_gradients(sums, self.reduce, self._arithmetic)


def _zeros(like: Value) -> Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()


def _same(one: StepGraph | None, other: StepGraph | None) -> bool:
    if one is None or other is None:
        return one is other
    return difference(one, other) is None


def whole_loss(handle: ShardedModel, part: Tensor) -> Tensor:
    """The sum over all ranks of their parts of a loss, each counted once. A collective."""
    return handle.over_all_ranks(part * handle.axes.speaks(LOSS_AXES, handle.rank))


@contextmanager
def gradients_added(handle: ShardedModel) -> Iterator[None]:
    """Inside, gradients are computed anew; behind it they have been added to those from before, as by `backward()`."""
    trained = [one.parameter for one in handle.owned() if one.parameter.requires_grad]
    before = [one.grad for one in trained]
    yield
    for parameter, earlier in zip(trained, before, strict=True):
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
