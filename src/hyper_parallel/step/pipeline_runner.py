"""Runs a planned pipeline on one rank: gathers, the Program over the micro-batches, reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.compat import is_out_of_memory
from hyper_parallel.compat.paged_out_parameters import present
from hyper_parallel.errors import HyperParallelError, OutOfMemoryError
from hyper_parallel.graph import Executable, StepGraph, executable
from hyper_parallel.graph.ir import Value
from hyper_parallel.graph.module_state import module_state
from hyper_parallel.launch import logs
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.runtime.interpreter import Interpreter, StepValues
from hyper_parallel.runtime.transfers import Transfers
from hyper_parallel.shard import ShardedModel
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


class PipelineRunner:
    """This rank's part of a pipeline, step after step. Every rank makes one, and calls the same methods."""

    def __init__(
        self,
        plan: PipelinePlan,
        handle: ShardedModel,
        peers: Mapping[tuple[int, ...], dist.ProcessGroup],
        transfers: Transfers,
        largest_of_copies: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """The model has its values; those of other stages are on the meta device. `peers`: as of `peers_of`;
        `largest_of_copies`: as of `Interpreter`. A collective."""
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
            largest_of_copies,
        )
        self._interpreter.compare()
        self._gather = _ready(plan.stages.gather(mine))
        self._reduce = plan.stages.reduce(mine)
        reduces = _ready(self._reduce)
        self._arithmetic = Arithmetic[Tensor](
            lambda _, given: {} if reduces is None else reduces.run(given), torch.add, _zeros
        )
        self._shared, self._peers = shared_gradients(plan), peers

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
        try:
            # Under a budget they may be elsewhere between steps, in which they are the graph's.
            with present(*self._state.values()), pulse.schedule(self._interpreter.positions):
                return self._interpreter.run(batches, self._weights(), when)
        except HyperParallelError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(when, error) from error
            raise

    def _out_of_memory(self, when: str, error: Exception) -> OutOfMemoryError:
        """The error with what filled the memory."""
        at = f"{when}, {pulse.position()}"
        found = self._interpreter.failed_node(error)
        if found is None:
            return OutOfMemoryError(f"{at}: out of memory outside of the stage's graph: {error}")
        described = describe(*found, self._handle.strategy, head_of(self._handle.model))
        return OutOfMemoryError(
            f"{at}: out of memory {described}; these are of one micro-batch, and {self._interpreter.in_flight} were in "
            "flight on this rank, of each of which a part is kept"
        )

    def _weights(self) -> Mapping[str, Tensor]:
        return {} if self._gather is None else self._gather.run(self._state)

    def _reduced(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of this rank's parameters from what its stages' micro-batches add up to."""
        found = reduced_gradients(sums, self._reduce, self._arithmetic)
        for name, holders in self._shared.items():
            group = self._peers.get(holders)
            if group is not None:
                if name not in found:
                    # Another holder's stages compute the whole gradient.
                    found[name] = _zeros(gradient_value(self._plan, name))
                dist.all_reduce(found[name], group=group)
        return found


def _ready(step: StepGraph | None) -> Executable | None:
    return None if step is None else executable(step)


def _zeros(like: Value) -> Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()


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
    for holders in sorted(set(shared_gradients(plan).values())):
        holds = place.index in holders
        ranks = sorted(place.groups[index].ranks[here] for index in holders) if holds else [handle.rank]
        group: dist.ProcessGroup | None = dist.new_group(ranks, use_local_synchronization=True)
        if group is None:
            raise HyperParallelError(f"rank {handle.rank} is not one of the ranks {ranks} that share weights")
        if holds:
            found[holders] = group
    return found
