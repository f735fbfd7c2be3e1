"""Guards: questions about input values that a captured step depends on, such as an all-ones mask.

A tensor of a capture has no values. Where one is computed from inputs alone, a small separate graph computes it from
the real ones, and the step goes on with the answer. The graph that is captured then is right for inputs for which the
same questions have the same answers, and `Question.of` asks them again. An answer that no input decides holds always.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.graph.execute import Executable, executable
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import Input, StepGraph, Storage, is_collective, values_of
from hyper_parallel.graph.memory_effects import draws_random, touched, writes

Number = bool | int | float


@dataclass(frozen=True)
class Question:
    """A number that the step read off a tensor."""

    asks: Executable
    answer: Number
    dim: int | None = None
    """Of a tensor whose size the data decide: the dim whose size is asked; None for a number in a tensor."""

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Number:
        """The answer for other inputs, by their names; of the same shapes."""
        with outside_modes(), torch.no_grad():
            found = self.asks.run(tensors)["answer"]
            return _number(found) if self.dim is None else found.size(self.dim)

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether it is the same."""
        found = self.of(tensors)
        return found == self.answer or (math.isnan(found) and math.isnan(self.answer))


class Questions:
    """Answers a capture's questions from real tensors, by the names of the inputs that they are, and keeps them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self.asked: list[Question] = []

    def know(self, name: str, tensor: torch.Tensor) -> None:
        """Answer questions of a further input, too."""
        self._tensors[name] = tensor

    def ask(
        self,
        of: fx.Node,
        graph: fx.Graph,
        inputs: list[Input],
        storages: list[Storage],
        constants: Mapping[str, torch.Tensor],
        dim: int | None = None,
    ) -> Number | None:
        """The one element of what `of` gives, or its size along `dim`; None where it is not computed from the tensors
        alone.

        `graph`: so far, with its inputs, storages and constants.
        """
        found = None if self._comes_from_elsewhere(of) else self._history(of, graph, inputs)
        if found is None:
            return None
        kept, given = found
        alone = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in kept:
            copied[node] = alone.node_copy(node, lambda source: copied[source])
            copied[node].meta = dict(node.meta)
            if not given and node.kwargs.get("device") is not None:
                # The device that the step is captured for may be absent here.
                copied[node].update_kwarg("device", torch.device("cpu"))
        last = alone.output((copied[of],))
        last.meta = dict(of.meta)
        asks = executable(StepGraph(alone, given, ["answer"], storages, dict(constants)))
        answer = Question(asks, math.nan, dim).of(self._tensors)
        self.asked.append(Question(asks, answer, dim))
        return answer

    @staticmethod
    def _comes_from_elsewhere(of: fx.Node) -> bool:
        """Whether what a node gives is computed from what no question can be answered from: said soon for the numbers
        of an exchange; a model with many experts asks for thousands."""
        seen, pending = {of}, deque([of])
        while pending:
            node = pending.popleft()
            if is_collective(node) or (
                node.op == "call_function" and (node.target is HOST or draws_random(node))
            ):
                return True
            new = [source for source in node.all_input_nodes if source not in seen]
            seen.update(new)
            pending.extend(new)
        return False

    def _history(
        self, of: fx.Node, graph: fx.Graph, inputs: list[Input]
    ) -> tuple[list[fx.Node], list[Input]] | None:
        """All that made or changed what `of` gives, in order, and the inputs among it."""
        needed = {value.storage for value in values_of(of)}
        names = dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))
        outside = {value.storage for node in names for value in values_of(node)}
        kept: list[fx.Node] = []
        wanted = {of}
        for node in reversed(graph.nodes):
            storages = {value.storage for value in values_of(node)}
            if node not in wanted and not (storages | writes(node)) & needed:
                continue
            if node.op == "placeholder" and names[node].name not in self._tensors:
                return None
            if node.op == "call_function" and (node.target is HOST or draws_random(node)):
                return None
            if is_collective(node):
                return None  # other ranks may not be asking
            if writes(node) & outside:
                return None  # asking twice would change it twice
            kept.append(node)
            needed |= touched(node)
            wanted.update(node.all_input_nodes)
        kept.reverse()
        return kept, [names[node] for node in kept if node.op == "placeholder"]


def _number(tensor: torch.Tensor) -> Number:
    found: Number = tensor.item()
    return found
