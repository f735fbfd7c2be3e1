"""Interprets a Program on one rank: runs its group's instruction list over the micro-batches of a step.

The order is that of `runtime.instruction_loop`; a stage's tasks are run by its `StageRunner`, from a graph of the stage
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.program import Program, Recv, RunPair, Send, Wait, runs_of
from hyper_parallel.runtime.instruction_loop import InstructionLoop
from hyper_parallel.runtime.positions import errors_placed, positions
from hyper_parallel.runtime.rank_transfers import RankTransfers
from hyper_parallel.runtime.reshard_transfers import KnownPorts, ReshardTransfers
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.runtime.transfers import Transfers


@dataclass(frozen=True)
class StepValues:
    """What a step's micro-batches come to on one rank."""

    gradients: Mapping[str, Tensor]
    """Of the parameters of this rank's stages, by their names."""
    totals: Mapping[str, Tensor]
    """Sums of the other outputs: the loss, on the ranks of the stage that computes it."""


class Interpreter(InstructionLoop[Tensor]):
    """One rank's part of a Program, step after step."""

    def __init__(
        self,
        program: Program,
        partition: Partition,
        state: Mapping[str, Tensor],
        rank: int,
        transfers: Transfers,
        begins: Callable[[int], None] = lambda place: None,
        turns: Mapping[tuple[int, int], Sequence[int]] | None = None,
        known: KnownPorts | None = None,
        runners: Mapping[int, StageRunner] | None = None,
    ) -> None:
        """`state`: parameters and buffers by the names of the graphs' inputs; `rank`: of the run. Ports of the program
        have the names of the partition's crossings. `begins` is called before each instruction, with its place in
        `positions`. `turns`: forward and backward stage of a pair to the order in which its tasks run, 0 for the
        forward and 1 for the backward one (`overlap.merge_tasks`); the same on all ranks of a group. By default they
        alternate. `known`: as of `ReshardTransfers`. `runners`: of this rank's stages, by number, where
        several Programs have the same stages; made here when left out."""
        device = next(iter(state.values())).device
        self._transfers: RankTransfers
        if any(port.received for port in program.ports.values()):
            self._transfers = ReshardTransfers(program, partition, rank, transfers, device, turns, known)
        else:
            self._transfers = RankTransfers(program, partition, rank, transfers, device, turns)
        group = self._transfers.group
        pauses = {
            program.tasks[run.task].stage
            for one in program.instructions[group.name]
            if isinstance(one, RunPair)
            for run in runs_of(one)
        }
        self._runners = (
            runners
            if runners is not None
            else {
                stage.number: StageRunner(stage, state, pauses=stage.number in pauses)
                for stage in stages_on(program, partition, group.name)
            }
        )
        super().__init__(program, group, self._runners, turns)
        self.positions = positions(program, group.name)
        self._told = begins

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
        for runner in self._runners.values():
            runner.begin(weights or {})
        self.go_on(batches, name)
        runners = self._runners.values()
        return StepValues(
            summed(runner.gradients for runner in runners), summed(runner.totals for runner in runners)
        )

    def go_on(self, batches: Sequence[Mapping[str, Tensor]], name: str = "") -> None:
        """As `run`, with runners that have begun the step, and have what it comes to."""
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
