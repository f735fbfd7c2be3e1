"""Writes a rank's part of a Program out as one graph: what plans over a whole step plans over all passes in flight.

The instruction list is run once on nodes in place of tensors (`program.instruction_loop`), so that the graph computes
what the interpreter does, in the same order. What it says to others are host points:

    begin          each instruction: the host keeps count, so that errors and the watchdog know where a rank is
    post           answers with memory for what is received            Recv
    send, wait     `offloading.schedule.build_problem`                              Send, Wait

Each micro-batch in flight has storages of its own, from its forward pass to its last use. The sizes of a stage's
tensors and the order of collectives are those of the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.copy_nodes import NodeCopies
from hyper_parallel.graph.execute import ready_outputs
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.graph_writer import GrowingGraph, span
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.ir import Input, Kind, Value, is_wait, values_of
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.graph.step_context import Region
from hyper_parallel.program import DeviceGroup, Program, Recv, Send, Wait
from hyper_parallel.program.instruction_loop import InstructionLoop, TaskRunner, Turns
from hyper_parallel.runtime.interpreter import stages_on
from hyper_parallel.runtime.stage_costs import parts_of
from hyper_parallel.runtime.stage_runner import changed_ports, own_outputs

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
        self._posted: dict[tuple[str, int], fx.Node] = {}
        self._sent: dict[tuple[str, int, str], tuple[fx.Node, fx.Node]] = {}
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
        self._whole.add_input(Input(name, kind), node, value.in_storage(index))

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
        return self._whole.call(_ADD, (one, other), one.meta["region"], value.in_storage(index))

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


# Writes the tasks of one pipeline stage into a rank's graph: copies of the stage's nodes for each micro-batch.
#
# What `StageRunner` does with tensors, this does with nodes: what the first micro-batch gives of a gradient is the
# total that the others are added to, in the order in which they arrive here, each as soon as it is computed.

_ADD_INTO = torch.ops.aten.add_.Tensor


class StageWriter(TaskRunner[fx.Node]):
    """The tasks of one stage, as nodes of a graph that grows."""

    def __init__(self, whole: GrowingGraph, stage: Stage) -> None:
        """`whole` knows the state, the weights and each micro-batch's inputs by name."""
        self._whole, self.stage = whole, stage
        self._forward, self._input, self._weight = parts_of(stage)
        self._own, self._changed = own_outputs(stage), changed_ports(stage)
        self._ready = ready_outputs(stage.step, GRADIENT)
        self._in_flight: dict[int, NodeCopies] = {}
        self.totals: dict[str, fx.Node] = {}
        """Outputs of the stage, summed over the micro-batches so far."""

    def forward_in_turns(
        self, micro_batch: int, batch: Mapping[str, fx.Node], received: Mapping[str, fx.Node]
    ) -> Turns[fx.Node]:
        """As of `TaskRunner`."""
        body = self.stage.step
        copies = NodeCopies(self._whole, body, f"_of_{self.stage.number}_{micro_batch}", micro_batch)
        self._in_flight[micro_batch] = copies
        for entry, node in zip(body.inputs, body.placeholders, strict=True):
            if entry.name in received:
                copies.given(node, self._owned(entry.name, node, received))
            else:
                copies.given(node, batch.get(entry.name) or self._whole.named[entry.name])
        for node in body.graph.nodes:
            if node.op == "get_attr":
                copies.constant(node, str(node.target))
        shown = yield from self._copied(copies, self._forward, {})
        return {one.name: copies.made[node] for one, node in zip(self.stage.sends, shown, strict=False)}

    def input_in_turns(self, micro_batch: int, received: Mapping[str, fx.Node]) -> Turns[fx.Node]:
        """As of `TaskRunner`."""
        copies = self._in_flight[micro_batch]
        answers = [
            (node, one.name)
            for node, one in zip(filter(_receives, self._input), self.stage.gradients_in, strict=True)
        ]
        given = {node: self._owned(name, _shaped(node), received) for node, name in answers}
        shown = yield from self._copied(copies, self._input, given)
        gradients = zip(self.stage.gradients_out, shown, strict=False)
        return {one.name: copies.made[node] for one, node in gradients}

    def weight_in_turns(self, micro_batch: int) -> Turns[fx.Node]:
        """As of `TaskRunner`."""
        copies = self._in_flight.pop(micro_batch)
        yield from self._copied(copies, self._weight, {})
        ready = {name for outputs in self._ready.values() for name, _ in outputs}
        for name, node in self.stage.step.returned.items():
            if name not in ready:
                self._add(name, node, copies)
        copies.tell_sizes()
        return {}

    def _copied(
        self, copies: NodeCopies, nodes: Sequence[fx.Node], given: Mapping[fx.Node, fx.Node]
    ) -> Generator[None, None, Sequence[fx.Node]]:
        """Append copies of a task's nodes; gives the nodes that its end shows. `given`: what the host answers."""
        shown: Sequence[fx.Node] = ()
        for node in nodes:
            if is_wait(node):
                yield
            if _receives(node):
                copies.given(_shaped(node), given[node])
            elif node.target is HOST:
                shown = node.args[1]  # type: ignore[assignment]
            elif node not in copies.made:
                copies.copy(node)
            for name, output in self._ready.get(node, ()):
                self._add(name, output, copies)
        return shown

    def _owned(self, name: str, like: fx.Node, received: Mapping[str, fx.Node]) -> fx.Node:
        """What was received, in memory that the stage may write to."""
        if name not in self._changed:
            return received[name]
        (value,) = values_of(like)
        return self._whole.own_copy(received[name], value, received[name].meta)

    def _add(self, name: str, node: fx.Node, copies: NodeCopies) -> None:
        made = copies.made[node]
        (value,) = values_of(made)
        total = self.totals.get(name)
        if total is None:
            own = made if name in self._own else self._whole.own_copy(made, value, made.meta)
            self.totals[name] = own
            if name.startswith(GRADIENT):
                (value,) = values_of(own)
                self._whole.gradients[value.storage] = name.removeprefix(GRADIENT)
            return
        (value,) = values_of(total)
        self.totals[name] = self._whole.call(_ADD_INTO, (total, made), made.meta["region"], value)


def _receives(node: fx.Node) -> bool:
    return node.target is HOST and node.args[0] == HostPoint.RECEIVE


def _shaped(answer: fx.Node) -> fx.Node:
    """The node that gives what the host answers its shape."""
    (shaped,) = answer.users
    return shaped
