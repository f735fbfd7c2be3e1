"""Runs a planned pipeline on one rank: gathers, the Program over the micro-batches, reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.module_state import module_state
from hyper_parallel.launch import logs
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.runtime.interpreter import Interpreter, StepValues
from hyper_parallel.runtime.transfers import Transfers
from hyper_parallel.shard import ShardedModel
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_micro_batch import batch_of, fields_of
from hyper_parallel.step.micro_batch import LOSS, ROWS
from hyper_parallel.step.pipeline_gradients import (
    gradient_value,
    shared_gradients,
)
from hyper_parallel.step.pipeline_plan import PipelinePlan
from hyper_parallel.step.program_runner import OncePerStep, located, zeros


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
