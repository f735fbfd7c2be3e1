"""Writes a rank's part of a Program out as one graph: what plans over a whole step plans over all passes in flight.

The instruction list is run once on nodes in place of tensors (`runtime.instruction_loop`), so that the graph computes
what the interpreter does, in the same order. What it says to others are host points:

    begin          each instruction: the host keeps count, so that errors and the watchdog know where a rank is
    post           answers with memory for what is received            Recv
    send, wait     `graph.transfer_nodes`                              Send, Wait

Each micro-batch in flight has storages of its own, from its forward pass to its last use. The sizes of a stage's
tensors and the order of collectives are those of the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.copy_nodes import GrowingGraph, NodeCopies, moved
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.ir import Input, Kind, Value, values_of
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.regions import Region
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.graph.suspension import HostPoint
from hyper_parallel.program import DeviceGroup, Program, Recv, Send, Wait
from hyper_parallel.runtime.instruction_loop import InstructionLoop
from hyper_parallel.runtime.interpreter import stages_on
from hyper_parallel.runtime.stage_writer import StageWriter

_STRIDED = torch.ops.aten.as_strided.default
_ADD, _ZERO = torch.ops.aten.add.Tensor, torch.ops.aten.zero_.default

Numbered = Callable[[str, int], str]
"""(name of a micro-batch's input, number of the micro-batch) to the name of the graph's input."""


def numbered(name: str, micro_batch: int) -> str:
    """Names by which each micro-batch has inputs of its own."""
    return f"{name}@{micro_batch}"


class RankWriter(InstructionLoop[fx.Node]):
    """Writes the graph of one device group's ranks: `schedule`, then what follows it (`copy`), then `finished`."""

    def __init__(
        self,
        program: Program,
        partition: Partition,
        group: DeviceGroup,
        turns: Mapping[tuple[int, int], Sequence[int]] | None = None,
        name_of: Numbered = numbered,
        gather: StepGraph | None = None,
        micro_batch: StepGraph | None = None,
    ) -> None:
        """`name_of`: the names of micro-batches' inputs; `gather`: what gives the stages' weights once a step;
        `micro_batch`: what the stages were cut from, where a rank is given all of its inputs, used or not."""
        self._whole = GrowingGraph()
        self._stages = stages_on(program, partition, group.name)
        self._writers = {stage.number: StageWriter(self._whole, stage) for stage in self._stages}
        super().__init__(program, group, self._writers, turns)
        self._like = self._stages[0].step
        self._ports: dict[str, Crossing] = {
            one.name: one for stage in partition.stages for one in (*stage.sends, *stage.gradients_out)
        }
        self._posted: dict[tuple[str, int | None], fx.Node] = {}
        self._sent: dict[tuple[str, int | None, str], tuple[fx.Node, fx.Node]] = {}
        self._gather, self._name_of = gather, name_of
        self._homes: dict[int, int] = {}
        """Storages of state, as all parts of the captured micro-batch number them, to those of this graph."""
        self._batches = self._inputs(micro_batch)
        self._nothing = replace(
            next(values_of(next(iter(self._whole.named.values())))), shape=(0,), stride=(1,)
        )

    @property
    def inputs(self) -> Mapping[str, fx.Node]:
        """The graph's inputs so far, and the gathered weights, by name."""
        return self._whole.named

    def _inputs(self, whole: StepGraph | None) -> list[dict[str, fx.Node]]:
        """Add the inputs; those of each micro-batch by the names that its graphs have for them."""
        ports = {one.name for stage in self._stages for one in stage.receives}
        gather = [] if self._gather is None else [self._gather]
        known = ports.union(*(one.outputs for one in gather))
        found = [dict[str, fx.Node]() for _ in range(self._program.micro_batches)]
        for step in (*gather, *(one.step for one in self._stages), *([] if whole is None else [whole])):
            for entry, node in zip(step.inputs, step.placeholders, strict=True):
                if entry.name in known:
                    continue
                if entry.kind != "input":
                    if step is not whole:
                        self._add_input(entry.name, entry.kind, node, step, self._homes)
                    continue
                for number, batch in enumerate(found):
                    name = self._name_of(entry.name, number)
                    self._add_input(name, entry.kind, node, step, {})
                    batch[entry.name] = self._whole.named[name]
        return found

    def _add_input(
        self, name: str, kind: Kind, node: fx.Node, step: StepGraph, homes: dict[int, int]
    ) -> None:
        """Add an input like one of `step`, where there is none of this name. `homes`: storages of `step`, and those
        that they are."""
        if name in self._whole.named:
            return
        (value,) = values_of(node)
        index = homes.get(value.storage)
        if index is None:
            storage = step.storages[value.storage]
            index = homes[value.storage] = self._whole.storage(storage.bytes, storage.device, name)
        self._whole.add_input(Input(name, kind), node, moved(value, index))

    def schedule(self) -> dict[str, fx.Node]:
        """Write the gathers and the whole instruction list; the outputs of the stages, summed over micro-batches."""
        if self._gather is not None:
            self._whole.named.update(self.copy(self._gather, self._whole.named))
        self._run_all(self._batches)
        found: dict[str, fx.Node] = {}
        for writer in self._writers.values():
            for name, node in writer.totals.items():
                found[name] = self.added(found[name], node) if name in found else node
        return found

    def copy(
        self, step: StepGraph, given: Mapping[str, fx.Node], there: Collection[str] = ()
    ) -> dict[str, fx.Node]:
        """Write a graph that runs once a step; its outputs. `given`: its inputs, by name; others that it uses become
        inputs of the whole, and those that are `there` in any case."""
        copies, homes = NodeCopies(self._whole, step, "_once", 0), dict[int, int]()
        for entry, node in zip(step.inputs, step.placeholders, strict=True):
            if entry.name in given:
                copies.given(node, given[entry.name])
            elif node.users or entry.name in there:
                self._add_input(entry.name, entry.kind, node, step, homes)
                copies.given(node, self._whole.named[entry.name])
        for node in step.graph.nodes:
            if node.op == "get_attr":
                copies.constant(node, str(node.target))
            elif node.op == "call_function":
                copies.copy(node)
        copies.tell_sizes()
        self._whole.groups.update(step.groups)
        return {name: copies.made[node] for name, node in step.returned.items()}

    def added(self, one: fx.Node, other: fx.Node) -> fx.Node:
        """Their sum, in memory of its own."""
        (value,) = values_of(one)
        index = self._whole.storage(value.elements * value.dtype.itemsize, value.device)
        return self._whole.call(_ADD, (one, other), one.meta["region"], replace(value, storage=index))

    def zeros(self, like: Value) -> fx.Node:
        """Zeros of this shape."""
        empty = self._whole.empty(like, {"region": _REGION, "module": "", "recomputed": False})
        (value,) = values_of(empty)
        return self._whole.call(_ZERO, (empty,), _REGION, value)

    def finished(self, outputs: Mapping[str, fx.Node] = MappingProxyType({})) -> StepGraph:
        """The graph, which returns these nodes of it."""
        return self._whole.finished(self._like, outputs)

    # What the loop does with nodes.

    def _begins(self, place: int) -> None:
        self._whole.host(HostPoint.BEGIN, (), _REGION, self._nothing)

    def _post(self, one: Recv) -> None:
        port = self._ports[one.port]
        count = span(port.value)
        answer = replace(port.value, shape=(count,), stride=(1,))
        region = Region("", one.micro_batch, port.direction)
        self._posted[one.port, one.micro_batch] = self._whole.host(HostPoint.POST, (), region, answer)

    def _send(self, one: Send, value: fx.Node) -> None:
        region = Region("", one.micro_batch, self._ports[one.port].direction)
        sent = self._whole.host(HostPoint.SEND, (value,), region, self._nothing)
        self._sent[one.port, one.micro_batch, one.to] = sent, value

    def _wait(self, one: Wait) -> fx.Node:
        port = self._ports[one.port]
        region = Region("", one.micro_batch, port.direction)
        sending = self._sent.pop((one.port, one.micro_batch, one.peer), None)
        if sending is not None:
            self._whole.host(HostPoint.WAIT, sending, region, self._nothing)
            return sending[1]
        buffer = self._posted.pop((one.port, one.micro_batch))
        (flat,) = values_of(buffer)
        self._whole.host(HostPoint.WAIT, (buffer,), region, self._nothing, {flat.storage})
        value = replace(port.value, storage=flat.storage)
        return self._whole.call(_STRIDED, (buffer, list(value.shape), list(value.stride)), region, value)

    def _drain(self) -> None:
        left = [node for sending in self._sent.values() for node in sending]
        if left:
            self._whole.host(HostPoint.WAIT, left, _REGION, self._nothing)


_REGION = Region("", None, "backward")
"""Of what is part of no micro-batch."""
