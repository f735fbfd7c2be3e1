"""Layer instances: which captured layer represents which layers, and the layer of each op.

Kinds of layers that follow each other with a period are found (all alike: period 1; every other one with a sliding
window: period 2; dense ones first: those are a prefix). Five periods are kept: two at either end, where a layer may
differ in how it hands on what it computed, and between them one that stands for all others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from hyper_parallel.estimate.repeat_ops import Loop, Tag
from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.lower import Lowered

KEPT = 5
"""Periods that are captured."""


@dataclass(frozen=True)
class CapturedLayers:
    """The layers that are captured."""

    total: int
    """Layers of the model."""
    before: int
    """Layers in front of the first period."""
    period: int
    repeats: int
    """How often the period comes in the model."""

    @property
    def layers(self) -> list[int]:
        """Their indices in the model."""
        begins = self.before + (KEPT // 2 + 1) * self.period
        behind = self.total - self.before - self.period * self.repeats
        return [*range(begins), *range(self.total - behind - KEPT // 2 * self.period, self.total)]

    @property
    def loop(self) -> Loop:
        """The middle period and how often it comes."""
        return Loop(KEPT // 2, self.repeats - KEPT + 1)

    def block(self, kept: int) -> Tag:
        """The period that a captured layer is in."""
        at = (kept - self.before) // self.period
        return at if 0 <= at < KEPT else None

    def real(self, kept: int, copy: int) -> int:
        """The model's index of a captured layer, of a copy of the middle period."""
        block = self.block(kept)
        if kept < self.before or (block is not None and block < KEPT // 2):
            return kept
        return kept + copy * self.period if block == KEPT // 2 else kept + self.total - len(self.layers)


def choose(kinds: Sequence[Sequence[int]]) -> CapturedLayers | None:
    """The layers to capture, given the indices of each kind's layers; None where all are to be."""
    of = {layer: kind for kind, layers in enumerate(kinds) for layer in layers}
    sequence = [of[layer] for layer in sorted(of)]
    best: CapturedLayers | None = None
    for period in range(1, len(sequence) // (KEPT + 1) + 1):
        for before in range(len(sequence)):
            stop = before + period
            while stop < len(sequence) and sequence[stop] == sequence[stop - period]:
                stop += 1
            repeats = (stop - before) // period
            found = CapturedLayers(len(sequence), before, period, repeats)
            if repeats > KEPT and (best is None or len(found.layers) < len(best.layers)):
                best = found
    return best


class Layers:
    """Knows which layer a node belongs to: by its module, or by the weights whose tensors it reads."""

    def __init__(self, step: StepGraph, prefix: str) -> None:
        self._name = re.compile(rf"(?:^|\.){re.escape(prefix)}\.(\d+)(?:\.|$)")
        self._of = {storage: self.named(entry.name) for storage, entry in step.outside.items()}
        """Storage to its layer."""
        for storage, name in step.gradients.items():
            self._of[storage] = self.named(name)
        self._nodes: dict[fx.Node, Tag] = {}
        self._last: Tag = None
        """Of the last node that is of a layer."""
        for node in step.nodes:
            tag = self._nodes[node] = self._tag(node)
            self._last = self._last if tag is None else tag
            for value in values_of(node):
                self._of.setdefault(value.storage, tag)
        for node in reversed(list(step.nodes)):
            if self._nodes[node] is None and not node.meta["module"]:
                # What one layer alone uses is that layer's.
                users = {self._nodes.get(user) for user in node.users}
                self._nodes[node] = users.pop() if len(users) == 1 else None

    def named(self, name: str) -> Tag:
        """The layer that a module, parameter or state is of."""
        found = self._name.search(name)
        return int(found[1]) if found else None

    def of(self, node: fx.Node) -> Tag:
        """The layer of a node."""
        return self._nodes[node]

    def of_all(self, found: Lowered) -> list[Tag]:
        """The layer of each op."""
        return [self._nodes[node] for node in found.nodes]

    def spans(self, node: fx.Node) -> bool:
        """Whether a node reads tensors of several layers."""
        tags = {self._of.get(value.storage) for source in node.all_input_nodes for value in values_of(source)}
        return len(tags - {None}) > 1

    def rename(self, name: str, kept: CapturedLayers, copy: int) -> str:
        """A name with the model's index of its layer."""

        def real(match: re.Match[str]) -> str:
            whole, start = match[0], match.start()
            at, end = match.start(1) - start, match.end(1) - start
            return f"{whole[:at]}{kept.real(int(match[1]), copy)}{whole[end:]}"

        return self._name.sub(real, name, count=1)

    def _tag(self, node: fx.Node) -> Tag:
        tag = self.named(node.meta["module"])
        if tag is not None or node.meta["module"]:
            return tag
        tags = {self._of.get(value.storage) for source in node.all_input_nodes for value in values_of(source)}
        tags.discard(None)
        if len(tags) == 2 and node.meta["phase"] == "backward" and self._last in tags:
            # A sum of gradients that two layers have to give: it runs with the one whose turn it is.
            return self._last
        return tags.pop() if len(tags) == 1 else None
