"""Interprets a Program on one rank: runs its group's instruction list over the micro-batches of a step.

The order is that of the instruction list; a stage's tasks are run by its `StageRunner`, from a graph of the stage
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.program import Program, Recv, Send, Wait
from hyper_parallel.program.instruction_loop import InstructionLoop
from hyper_parallel.runtime.graph_interpreter import errors_placed, positions
from hyper_parallel.runtime.rank_transfers import RankTransfers, Transfers
from hyper_parallel.runtime.reshard_transfers import KnownPorts, ReshardTransfers
from hyper_parallel.runtime.stage_runner import StageRunner


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
