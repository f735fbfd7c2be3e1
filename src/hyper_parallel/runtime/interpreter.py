"""Interprets a Program on one rank: runs its group's instruction list over the micro-batches of a step.

The order is that of the instruction list; a stage's tasks are run by its `StageRunner`, from a graph of the stage
alone.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic

import torch
from torch import Tensor, fx

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.program import (
    DeviceGroup,
    Instruction,
    Program,
    Recv,
    Run,
    RunPair,
    Send,
    TaskKind,
    Wait,
)
from hyper_parallel.runtime.graph_interpreter import errors_placed, positions
from hyper_parallel.runtime.rank_transfers import RankTransfers, Transfers
from hyper_parallel.runtime.reshard_transfers import KnownPorts, ReshardTransfers
from hyper_parallel.runtime.stage_runner import StageRunner, TaskRunner, Value, ended, together

# Runs the instruction list of a device group in order, whatever its values are.
#
# With tensors as values it runs a step (`Interpreter`); with nodes of a graph it writes the step out as one
# graph (`runtime.rank_graph`), which then computes the same in the same order.
#
# `Run` resumes a stage's task, `Recv` posts, `Send` begins, and `Wait` ends a transfer (`program.program` says
# what each may block on). Values that cross between stages of one group stay in memory. A backward pass that runs whole
# computes the gradients of its inputs first. They are sent before the gradients of weights are computed, so that the
# stage before waits for less.


class InstructionLoop(ABC, Generic[Value]):
    """One group's part of a Program."""

    def __init__(
        self,
        program: Program,
        group: DeviceGroup,
        runners: Mapping[int, TaskRunner[Value]],
        turns: Mapping[tuple[int, int], Sequence[int]] | None = None,
    ) -> None:
        """`runners`: of the group's stages, by number. `turns`: as of `Interpreter`."""
        self._program, self._group = program, group
        self._instructions = program.instructions[group.name]
        self._tasks, self._turns = runners, turns or {}
        self._values: dict[tuple[str, int], Value] = {}
        self._weights_left: tuple[TaskRunner[Value], int, int] | None = None
        """The stage, micro-batch and place of a backward pass that has its gradients of weights still to compute."""
        self.place = 0
        """Of the instruction at hand; behind the last one their number."""

    @abstractmethod
    def _begins(self, place: int) -> None:
        """The instruction at this place begins; behind the last one, the end of the schedule."""

    def _resumes(self, place: int) -> None:
        """The gradients of weights of the backward pass at this place, behind other instructions, begin."""

    @abstractmethod
    def _post(self, one: Recv) -> None:
        """Post a receive."""

    @abstractmethod
    def _send(self, one: Send, value: Value) -> None:
        """Begin to send a value."""

    @abstractmethod
    def _wait(self, one: Wait) -> Value:
        """Wait for a transfer: what was received, or what was sent."""

    @abstractmethod
    def _drain(self) -> None:
        """Wait for the sends that nobody waited for."""

    def _run_all(self, batches: Sequence[Mapping[str, Value]]) -> None:
        """Run the whole list, on the inputs of each micro-batch that are neither state nor ports."""
        self._values.clear()
        self._weights_left, self.place = None, 0
        for place, one in enumerate(self._instructions):
            if not self._may_precede_weights(one):
                self._end_backward()
            self.place = place
            self._begins(place)
            self._do(one, batches)
        self._end_backward()
        self.place = len(self._instructions)
        self._begins(self.place)
        self._drain()

    def _do(self, one: Instruction, batches: Sequence[Mapping[str, Value]]) -> None:
        match one:
            case Run():
                self._task(one, batches)
            case RunPair(forward, backward):
                self._pair(forward, backward, batches)
            case Recv():
                self._post(one)
            case Send(port, micro_batch, _):
                self._send(one, self._values.pop((port, micro_batch)))
            case Wait(port, micro_batch, _):
                value = self._wait(one)
                if self._program.ports[port].group != self._group.name:
                    self._values[port, micro_batch] = value

    def _task(self, run: Run, batches: Sequence[Mapping[str, Value]]) -> None:
        task, micro_batch = self._program.tasks[run.task], run.micro_batch
        assert task.stage is not None, "a task of a micro-batch belongs to a stage"
        runner = self._tasks[task.stage]
        given = self._taken(run)
        made: Mapping[str, Value] = {}
        if task.kind is TaskKind.FORWARD:
            made = ended(runner.forward_in_turns(micro_batch, batches[micro_batch], given))
        elif task.kind is TaskKind.WEIGHT:
            runner.weight(micro_batch)
        else:
            made = ended(runner.input_in_turns(micro_batch, given))
            if task.kind is TaskKind.BACKWARD:
                self._weights_left = runner, micro_batch, self.place
        for port, value in made.items():
            self._values[port, micro_batch] = value

    def _pair(self, forward: Run, backward: Run, batches: Sequence[Mapping[str, Value]]) -> None:
        """Run two tasks in turns. Gradients of weights follow behind what the pair sends, as in a backward pass alone;
        in a stage that sends nothing back they are part of the pair."""
        ahead, back = (self._program.tasks[one.task] for one in (forward, backward))
        assert ahead.stage is not None, "a task of a micro-batch belongs to a stage"
        assert back.stage is not None, "a task of a micro-batch belongs to a stage"
        runner = self._tasks[back.stage]
        whole = back.kind is TaskKind.BACKWARD and not runner.stage.gradients_out
        backward_in_turns = runner.backward_in_turns if whole else runner.input_in_turns
        tasks = [
            self._tasks[ahead.stage].forward_in_turns(
                forward.micro_batch, batches[forward.micro_batch], self._taken(forward)
            ),
            backward_in_turns(backward.micro_batch, self._taken(backward)),
        ]
        order = self._turns.get((ahead.stage, back.stage), itertools.cycle((0, 1)))
        for one, made in zip((forward, backward), together(tasks, order), strict=True):
            self._values.update({(port, one.micro_batch): value for port, value in made.items()})
        if back.kind is TaskKind.BACKWARD and not whole:
            self._weights_left = runner, backward.micro_batch, self.place

    def _taken(self, run: Run) -> dict[str, Value]:
        """The values that a task takes, which nothing else needs."""
        return {
            port: self._values.pop((port, run.micro_batch)) for port in self._program.tasks[run.task].takes
        }

    def _may_precede_weights(self, one: Instruction) -> bool:
        """Whether an instruction is part of sending what a backward pass gives. Waiting for what comes is not: there
        is work to do meanwhile."""
        if isinstance(one, Wait):
            return self._program.ports[one.port].group == self._group.name
        return isinstance(one, Send | Recv)

    def _end_backward(self) -> None:
        """Compute the gradients of weights that a backward pass has left."""
        if self._weights_left is not None:
            runner, micro_batch, place = self._weights_left
            self._weights_left = None
            self._resumes(place)
            runner.weight(micro_batch)


class Interpreter(InstructionLoop[Tensor]):
    """One rank's part of a Program, step after step."""

    def __init__(
        self,
        program: Program,
        partition: Partition,
        rank: int,
        transfers: Transfers,
        device: torch.device,
        runners: Mapping[int, StageRunner],
        begins: Callable[[int], None] = lambda place: None,
        turns: Mapping[tuple[int, int], Sequence[int]] | None = None,
        known: KnownPorts | None = None,
    ) -> None:
        """`rank`: of the run. Ports of the program have the names of the partition's crossings. `device`: where this
        rank computes. `runners`: of this rank's stages, by number; they pause where a task of theirs runs in a pair.
        `begins` is called before each instruction, with its place in `positions`. `turns`: forward and backward stage
        of a pair to the order in which its tasks run, 0 for the forward and 1 for the backward one
        (`overlap.merge_tasks`); the same on all ranks of a group. By default they alternate. `known`: as of
        `ReshardTransfers`."""
        self._transfers: RankTransfers
        if any(port.received for port in program.ports.values()):
            self._transfers = ReshardTransfers(program, partition, rank, transfers, device, turns, known)
        else:
            self._transfers = RankTransfers(program, partition, rank, transfers, device, turns)
        group = self._transfers.group
        super().__init__(program, group, runners, turns)
        self._runners = runners
        self.positions = positions(program, group.name)
        self._told = begins

    def run(self, batches: Sequence[Mapping[str, Tensor]], name: str = "") -> None:
        """Run a step, which the stages' runners have begun, and whose outputs they have then. `batches`: the inputs of
        each micro-batch that are neither state nor ports; `name`: of the step, in errors.

        Raises TransferError where a transfer does not end in time. Every error has the stage, the micro-batch and the
        instruction: those of this project in their message, others in a note.
        """
        if len(batches) != self._program.micro_batches:
            raise HyperParallelError(
                f"the program is for {self._program.micro_batches} micro-batches, and {len(batches)} are given"
            )
        with errors_placed(lambda: name, self.positions, lambda: self.place):
            self._run_all(batches)

    def compare(self) -> None:
        """As `RankTransfers.compare`."""
        self._transfers.compare()

    def failed_node(self, error: BaseException) -> tuple[StepGraph, fx.Node] | None:
        """The graph, and the node of it, in which an error of `run` arose; None where it came from elsewhere."""
        found = ((one.stage.step, one.node_of(error)) for one in self._runners.values())
        return next(((step, node) for step, node in found if node is not None), None)

    @property
    def in_flight(self) -> int:
        """Micro-batches, over this rank's stages, whose forward pass has run and whose backward pass has not ended."""
        return sum(one.in_flight for one in self._runners.values())

    def _begins(self, place: int) -> None:
        self._told(place)

    def _resumes(self, place: int) -> None:
        # An error of them, and the time that they take, belong to the backward pass.
        self.place = place
        self._told(place)

    def _post(self, one: Recv) -> None:
        self._transfers.post(one)

    def _send(self, one: Send, value: Tensor) -> None:
        self._transfers.send(one, value)

    def _wait(self, one: Wait) -> Tensor:
        return self._transfers.wait(one)

    def _drain(self) -> None:
        self._transfers.drain()


def stages_on(program: Program, partition: Partition, group: str) -> list[Stage]:
    """The stages that a device group runs."""
    numbers = {task.stage for task in program.tasks.values() if task.group == group}
    return [stage for stage in partition.stages if stage.number in numbers]


def summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """By name; a weight that several stages of this rank use has a part of its gradient in each."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found[name] + value if name in found else value
    return found
