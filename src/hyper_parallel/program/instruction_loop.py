"""Instruction loop: runs a device group's list of a Program in order, whatever its values are.

With tensors as values it runs a step (`runtime.interpreter`), with nodes of a graph it writes the step out as one graph
(`runtime.rank_graph`), and with storages it predicts it (`program.expand`): what is predicted is what runs.

`Run` resumes a stage's task, `Recv` posts, `Send` begins, and `Wait` ends a transfer (`program.program` says what each
may block on). Values that cross between stages of one group stay in memory. A backward pass that runs whole computes
the gradients of its inputs first. They are sent before the gradients of weights are computed, so that the stage before
waits for less.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program.program import (
    Instruction,
    Program,
    Recv,
    Run,
    RunPair,
    Send,
    TaskKind,
    Wait,
)

Value = TypeVar("Value")
Turns = Generator[None, None, dict[str, Value]]
"""A task that stops before each wait for a collective, and gives values by the names of their ports."""


def ended(task: Turns[Value]) -> dict[str, Value]:
    """What a task gives, run without stopping."""
    try:
        while True:
            next(task)
    except StopIteration as stop:
        made: dict[str, Value] = stop.value
        return made


class TaskRunner(ABC, Generic[Value]):
    """The tasks of one stage. Those in turns stop before each wait for a collective."""

    @abstractmethod
    def forward_in_turns(
        self, micro_batch: int, batch: Mapping[str, Value], received: Mapping[str, Value]
    ) -> Turns[Value]:
        """The forward pass of a micro-batch: what goes to later stages, by port. `batch`: its inputs that are neither
        state nor ports; `received`: values by port."""

    @abstractmethod
    def input_in_turns(self, micro_batch: int, received: Mapping[str, Value]) -> Turns[Value]:
        """The gradients of a micro-batch's inputs: what goes back to earlier stages, by port."""

    @abstractmethod
    def weight_in_turns(self, micro_batch: int) -> Turns[Value]:
        """The gradients of weights, which are added to those of other micro-batches; this one is over with it."""

    def backward_in_turns(self, micro_batch: int, received: Mapping[str, Value]) -> Turns[Value]:
        """The gradients of inputs and of weights."""
        made = yield from self.input_in_turns(micro_batch, received)
        yield from self.weight_in_turns(micro_batch)
        return made

    def weight(self, micro_batch: int) -> None:
        """The gradients of weights, without stopping."""
        ended(self.weight_in_turns(micro_batch))


def together(tasks: Sequence[Turns[Value]], order: Iterable[int]) -> list[dict[str, Value]]:
    """What two tasks give that run in turns: `order` has the task whose turn it is, from one of its stops to the next.

    Tasks that have not ended when `order` has are run to their end, one after the other.
    """
    made: dict[int, dict[str, Value]] = {}
    for turn in order:
        if len(made) == len(tasks):
            break
        if turn not in made:
            try:
                next(tasks[turn])
            except StopIteration as stop:
                made[turn] = stop.value
    return [made[at] if at in made else ended(task) for at, task in enumerate(tasks)]


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
            if self._weights_left is not None and not self._may_precede_weights(place):
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
        whole = back.kind is TaskKind.BACKWARD and not back.gives
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

    def _may_precede_weights(self, place: int) -> bool:
        """Whether the instruction at a place is part of sending what a backward pass gives. Waiting for what comes is
        not, nor for a send that makes no room for another one: there is work to do meanwhile."""
        for at in range(place, len(self._instructions)):
            one = self._instructions[at]
            if isinstance(one, Send):
                return True
            if isinstance(one, Recv):
                if at == place:
                    return True
            elif not isinstance(one, Wait) or self._program.ports[one.port].group != self._group.name:
                return False
        return False

    def _end_backward(self) -> None:
        """Compute the gradients of weights that a backward pass has left."""
        if self._weights_left is not None:
            runner, micro_batch, place = self._weights_left
            self._weights_left = None
            self._resumes(place)
            runner.weight(micro_batch)
