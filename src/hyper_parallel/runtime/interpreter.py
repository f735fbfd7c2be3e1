"""Interprets a Program on one rank: runs its group's instruction list over the micro-batches of a step.

`Run` resumes a stage's generator, `Recv` posts, `Send` begins, and `Wait` ends a transfer (`program.instructions` says
what each may block on). Values that cross between stages of one group stay in memory. Before the first step every rank
compares the sizes of what it sends and receives with the others: a larger send into a smaller receive would abort a
process on gloo, and hang on NCCL.

A backward pass that runs whole computes the gradients of its inputs first. They are sent before the gradients of
weights are computed, so that the stage before waits for less.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, fx

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.program import Instruction, Program, Recv, Reduce, Run, Send, TaskKind, Wait
from hyper_parallel.runtime.positions import positions
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.runtime.transfers import Transfers


@dataclass(frozen=True)
class StepValues:
    """What a step's micro-batches come to on one rank."""

    gradients: Mapping[str, Tensor]
    """Of the parameters of this rank's stages, by their names."""
    totals: Mapping[str, Tensor]
    """Sums of the other outputs: the loss, on the ranks of the stage that computes it."""


class Interpreter:
    """One rank's part of a Program, step after step."""

    def __init__(
        self,
        program: Program,
        partition: Partition,
        state: Mapping[str, Tensor],
        rank: int,
        transfers: Transfers,
        begins: Callable[[int], None] = lambda place: None,
    ) -> None:
        """`state`: parameters and buffers by the names of the graphs' inputs; `rank`: of the run. Ports of the program
        have the names of the partition's crossings. `begins` is called before each instruction, with its place in
        `positions`."""
        self._program, self._rank = program, rank
        (self._group,) = (one for one in program.groups.values() if rank in one.ranks)
        self._instructions = program.instructions[self._group.name]
        self.positions = positions(program, self._group.name)
        self._begins = begins
        stages = {task.stage for task in program.tasks.values() if task.group == self._group.name}
        self._runners = {
            stage.number: StageRunner(stage, state) for stage in partition.stages if stage.number in stages
        }
        self._ports: dict[str, Crossing] = {
            one.name: one for stage in partition.stages for one in (*stage.sends, *stage.gradients_out)
        }
        self._device = next(iter(state.values())).device
        self._transfers = transfers
        self._values: dict[tuple[str, int | None], Tensor] = {}
        self._weights_left: tuple[StageRunner, int] | None = None
        """The stage and micro-batch of a backward pass that has its gradients of weights still to compute."""

    def run(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        weights: Mapping[str, Tensor] | None = None,
        name: str = "",
    ) -> StepValues:
        """Run a step: `batches` are the inputs of each micro-batch that are neither state nor ports; `weights` those
        that are the same in all micro-batches of this step; `name`: of the step, in errors.

        Raises TransferError where a transfer does not end in time. Every error has the stage, the micro-batch and the
        instruction: those of this project in their message, others in a note.
        """
        if len(batches) != self._program.micro_batches:
            raise HyperParallelError(
                f"the program is for {self._program.micro_batches} micro-batches, and {len(batches)} are given"
            )
        self._values.clear()
        self._weights_left = None
        for runner in self._runners.values():
            runner.begin(weights or {})
        place, begins = 0, self._begins
        try:
            for place, one in enumerate(self._instructions):
                if not self._may_precede_weights(one):
                    self._end_backward()
                begins(place)
                self._do(one, batches)
            self._end_backward()
            place = len(self._instructions)
            begins(place)
            self._transfers.drain()
        except HyperParallelError as error:
            error.args = (f"{self._place(name, place)}: {error}",)
            raise
        except Exception as error:
            error.add_note(f"in {self._place(name, place)}")
            raise
        runners = self._runners.values()
        return StepValues(
            _summed(runner.gradients for runner in runners), _summed(runner.totals for runner in runners)
        )

    def _do(self, one: Instruction, batches: Sequence[Mapping[str, Tensor]]) -> None:
        match one:
            case Run(task, micro_batch):
                self._task(task, micro_batch, batches)
            case Recv(port, _, source):
                crossing = self._ports[port]
                self._transfers.post(
                    self._key(one),
                    self._peer(source),
                    span(crossing.value),
                    crossing.value.dtype,
                    self._device,
                )
            case Send(port, micro_batch, to):
                self._transfers.send(self._key(one), self._peer(to), self._values.pop((port, micro_batch)))
            case Wait(port, micro_batch, _):
                value = self._transfers.wait(self._key(one))
                if self._program.ports[port].group != self._group.name:
                    self._values[port, micro_batch] = value
            case Reduce(port, over):
                raise HyperParallelError(
                    f"sums over {', '.join(over)} of {port} are made by the optimizer's step"
                )

    def _task(self, name: str, micro_batch: int | None, batches: Sequence[Mapping[str, Tensor]]) -> None:
        task = self._program.tasks[name]
        assert micro_batch is not None, "tasks of a whole step are run by the optimizer's step"
        assert task.stage is not None, "a task of a micro-batch belongs to a stage"
        runner = self._runners[task.stage]
        given = {port: self._values.pop((port, micro_batch)) for port in task.takes}
        made: Mapping[str, Tensor] = {}
        if task.kind is TaskKind.FORWARD:
            made = runner.forward(micro_batch, batches[micro_batch], given)
        elif task.kind is TaskKind.WEIGHT:
            runner.weight(micro_batch)
        else:
            made = runner.input(micro_batch, given)
            if task.kind is TaskKind.BACKWARD:
                self._weights_left = runner, micro_batch
        for port, value in made.items():
            self._values[port, micro_batch] = value

    def _may_precede_weights(self, one: Instruction) -> bool:
        """Whether an instruction is part of sending what a backward pass gives. Waiting for what comes is not: there
        is work to do meanwhile."""
        if isinstance(one, Wait):
            return self._program.ports[one.port].group == self._group.name
        return isinstance(one, Send | Recv)

    def _end_backward(self) -> None:
        """Compute the gradients of weights that a backward pass has left."""
        if self._weights_left is not None:
            runner, micro_batch = self._weights_left
            self._weights_left = None
            runner.weight(micro_batch)

    def _place(self, name: str, place: int) -> str:
        return ", ".join(filter(None, (name, self.positions[place].text)))

    def failed_node(self, error: BaseException) -> tuple[StepGraph, fx.Node] | None:
        """The graph, and the node of it, in which an error of `run` arose; None where it came from elsewhere."""
        found = ((one.stage.step, one.node_of(error)) for one in self._runners.values())
        return next(((step, node) for step, node in found if node is not None), None)

    @property
    def in_flight(self) -> int:
        """Micro-batches, over this rank's stages, whose forward pass has run and whose backward pass has not ended."""
        return sum(one.in_flight for one in self._runners.values())

    def _peer(self, group: str) -> int:
        """The rank of another group with this rank's place in its mesh."""
        return self._program.groups[group].ranks[self._group.place(self._rank)]

    def _key(self, one: Send | Recv | Wait) -> tuple[str, int | None, str]:
        other = one.to if isinstance(one, Send) else one.source if isinstance(one, Recv) else one.peer
        return one.port, one.micro_batch, other

    def compare(self) -> None:
        """Raise HyperParallelError where this rank and another one disagree on what they send each other: to be called
        before the first step, on every rank. A collective."""
        mine: dict[str, str] = {}
        for one in self._instructions:
            if isinstance(one, Send | Recv):
                out = isinstance(one, Send)
                other = self._peer(one.to if isinstance(one, Send) else one.source)
                channel = f"{self._rank} to {other}" if out else f"{other} to {self._rank}"
                value = self._ports[one.port].value
                carried = (
                    f"{one.port} {one.micro_batch} {span(value)} {value.shape} {value.stride} {value.dtype}"
                )
                before = mine.get(channel, "")
                mine[channel] = hashlib.blake2b(f"{before}{carried}".encode(), digest_size=16).hexdigest()
        order = hashlib.blake2b(repr(self._instructions).encode(), digest_size=16).hexdigest()
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, json.dumps({**mine, "order": order}))
        for other in self._group.ranks:
            if json.loads(everyone[other])["order"] != order:
                raise HyperParallelError(
                    f"ranks {self._rank} and {other} of {self._group.name} have different orders of instructions, and "
                    "would not meet in the collectives of their stages; both must have planned the same schedule"
                )
        for channel, digest in mine.items():
            sender, _, receiver = channel.partition(" to ")
            other = int(receiver if int(sender) == self._rank else sender)
            if json.loads(everyone[other]).get(channel) != digest:
                raise HyperParallelError(
                    f"rank {sender} sends rank {receiver} other values than rank {receiver} expects; both must have "
                    "captured the same model, micro-batch and schedule"
                )


def _summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """By name; a weight that several stages of this rank use has a part of its gradient in each."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found[name] + value if name in found else value
    return found
