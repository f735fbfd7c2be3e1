"""Writes the tasks of one pipeline stage into a rank's graph: copies of the stage's nodes for each micro-batch.

What `StageRunner` does with tensors, this does with nodes: what the first micro-batch gives of a gradient is the total
that the others are added to, in the order in which they arrive here, each as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import fx

from hyper_parallel.graph.collective_groups import is_wait
from hyper_parallel.graph.copy_nodes import GrowingGraph, NodeCopies
from hyper_parallel.graph.execute import ready_outputs
from hyper_parallel.graph.gradient_sums import GRADIENT
from hyper_parallel.graph.ir import values_of
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.graph.suspension import HOST, HostPoint
from hyper_parallel.runtime.stage_costs import parts_of
from hyper_parallel.runtime.stage_runner import changed_ports, own_outputs
from hyper_parallel.runtime.turns import Turns, ended

_ADD = torch.ops.aten.add_.Tensor


class StageWriter:
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

    def backward_in_turns(self, micro_batch: int, received: Mapping[str, fx.Node]) -> Turns[fx.Node]:
        """As of `TaskRunner`."""
        made = yield from self.input_in_turns(micro_batch, received)
        yield from self._weight_in_turns(micro_batch)
        return made

    def weight(self, micro_batch: int) -> None:
        """As of `TaskRunner`."""
        ended(self._weight_in_turns(micro_batch))

    def _weight_in_turns(self, micro_batch: int) -> Turns[fx.Node]:
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
        self.totals[name] = self._whole.call(_ADD, (total, made), made.meta["region"], value)


def _receives(node: fx.Node) -> bool:
    return node.target is HOST and node.args[0] == HostPoint.RECEIVE


def _shaped(answer: fx.Node) -> fx.Node:
    """The node that gives what the host answers its shape."""
    (shaped,) = answer.users
    return shaped
