"""Runs a rank's step that was written out as one graph: the host of its transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, fx

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.execute import Executable, Host
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.program import Instruction, Program, Recv, Run, RunPair, Send, Wait
from hyper_parallel.runtime.rank_transfers import RankTransfers
from hyper_parallel.runtime.stage_runner import flat


class GraphInterpreter:
    """One rank's part of a Program as one graph, step after step."""

    def __init__(
        self,
        program: Program,
        runs: Executable,
        transfers: RankTransfers,
        begins: Callable[[int], None] = lambda place: None,
    ) -> None:
        """`runs`: what `RankWriter` wrote, or what a pass has made of it. `begins`: as of `Interpreter`."""
        self._runs, self._transfers, self._begins = runs, transfers, begins
        self._instructions = program.instructions[transfers.group.name]
        self.positions = positions(program, transfers.group.name)
        self._host: Host | None = None
        self._place: int | None = 0
        """Of the instruction at hand; None behind the schedule."""
        self._next = 0

    def run(
        self, tensors: Mapping[str, Tensor], host: Host | None = None, name: Callable[[], str] = str
    ) -> dict[str, Tensor]:
        """Run a step on `tensors`, by the names of the graph's inputs; its outputs, by name. `host`: is asked what is
        no transfer. `name`: of the step, in errors, which have positions as those of `Interpreter` up to the end of
        the schedule."""
        self._host, self._place, self._next = host, 0, 0
        try:
            with errors_placed(name, self.positions, lambda: self._place):
                return self._runs.run(tensors, self._answer)
        finally:
            self._host = None  # it has the step's batch

    def node_of(self, error: BaseException) -> fx.Node | None:
        """As of `Executable`."""
        return self._runs.node_of(error)

    def _answer(self, point: HostPoint, values: Sequence[Tensor]) -> Tensor | None:
        """What the graph asks the host."""
        if point is HostPoint.BEGIN:
            self._place, self._next = self._next, self._next + 1
            self._begins(self._place)
            return None
        if point in (HostPoint.POST, HostPoint.SEND, HostPoint.WAIT):
            assert self._place is not None, "transfers are part of the schedule"
            return self._transfer(self._place, point, values)
        if self._next == len(self.positions):
            self._place = None
        assert self._host is not None, f"the graph asks the host at {point!r}"
        return self._host(point, values)

    def _transfer(self, place: int, point: HostPoint, values: Sequence[Tensor]) -> Tensor | None:
        """What the instruction at a place has to do with another rank."""
        if place == len(self._instructions):
            self._transfers.drain()
            return None
        match self._instructions[place]:
            case Recv() as one if point is HostPoint.POST:
                return self._transfers.post(one)
            case Send() as one if point is HostPoint.SEND:
                self._transfers.send(one, flat(values[0], self._transfers.port(one.port)))
            case Wait() as one if point is HostPoint.WAIT:
                self._transfers.wait(one)
            case other:
                raise AssertionError(f"{other} asks the host at {point!r}")
        return None


# Positions in a Program, for people: stage, micro-batch and instruction.
#
# A rank that stops, waits or fails in the middle of a schedule is described by them (`launch.watchdog`, errors of
# `Interpreter`). They are made once, so that a step only counts instructions.


@dataclass(frozen=True)
class Position:
    """A place in the instruction list of a group."""

    text: str
    """``stage 1, micro-batch 2, Run(forward 1)``; micro-batches are counted from 0."""
    waits: bool
    """Whether a rank that stands still there waits for another group."""


def positions(program: Program, group: str) -> tuple[Position, ...]:
    """The positions of a group's instructions, and behind them that of the end of a step."""
    found = [
        Position(_text(program, group, one), isinstance(one, Send | Wait))
        for one in program.instructions[group]
    ]
    return *found, Position("the end of the schedule, where the last sends are waited for", True)


@contextmanager
def errors_placed(
    name: Callable[[], str], known: Sequence[Position], place: Callable[[], int | None]
) -> Iterator[None]:
    """Inside, errors get the position at which they arise, `place` in `known`, behind the `name` of the step: those of
    this project in their message, others in a note. Where the place is None they get none."""
    try:
        yield
    except Exception as error:
        at = place()
        if at is None:
            raise
        where = ", ".join(filter(None, (name(), known[at].text)))
        if isinstance(error, HyperParallelError):
            error.args = (f"{where}: {error}",)
        else:
            error.add_note(f"in {where}")
        raise


def _text(program: Program, group: str, one: Instruction) -> str:
    if isinstance(one, RunPair):
        return " beside ".join(_text(program, group, run) for run in (one.forward, one.backward))
    stage = _stage(program, group, one)
    places = [] if stage is None else [f"stage {stage}"]
    numbered = f"micro-batch {one.micro_batch}"
    return ", ".join([*places, numbered, str(one).replace(f", {numbered}", "")])


def _stage(program: Program, group: str, one: Run | Send | Recv | Wait) -> int | None:
    """The stage of this group that computes, or takes, what an instruction is about."""
    if isinstance(one, Run):
        return program.tasks[one.task].stage
    gives = program.ports[one.port].group == group
    return next(
        (
            task.stage
            for task in program.tasks.values()
            if task.group == group and one.port in (task.gives if gives else task.takes)
        ),
        None,
    )
