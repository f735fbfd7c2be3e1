"""Recomputation passes: storages dropped after the forward pass and computed again in the backward pass.

For a storage, *late* begins with the first node of the backward pass that uses it. The nodes that made its contents
are repeated before that, each as late as possible, and what is late uses the repetition. A repeated node is given

- what it was given before, where that comes from outside, or is alive late anyhow;
- else a repetition of that, and so on.

The same kernels run on the same bits, so the step computes the same bits. What cannot be repeated is refused, or kept
alive where it is only on the way: operators that draw from a random generator or write to what outlives the step,
collectives other than gathers of weights (unless asked for), and nodes whose sources have been overwritten since.

Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174; by storages, not by layers, as in
Jain et al., "Checkmate", arXiv 1910.02653.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import replace
from typing import Literal

from torch import fx

from hyper_parallel.compat.fx_graph import copy_node
from hyper_parallel.errors import GraphError
from hyper_parallel.graph.dependencies import later
from hyper_parallel.graph.graph_writer import moved_meta
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import StepGraph, Storage, is_collective, values_of
from hyper_parallel.graph.liveness import of_weights
from hyper_parallel.graph.memory_effects import (
    draws_random,
    effects,
    reads,
    storages_of,
    touched,
    trim,
    writes,
)
from hyper_parallel.graph.step_context import Phase, region_of

_EARLY = ("forward", "loss")


Repeated = Literal["none", "weights", "all"]
"""Which collectives may be repeated: none, those that gather weights, or any."""
_REPEATED: dict[bool, Repeated] = {False: "weights", True: "all"}


def recompute(
    step: StepGraph,
    storages: Collection[int],
    *,
    collectives: Repeated = "weights",
    kept: Collection[int] = (),
    lates: Mapping[int, int] | None = None,
) -> StepGraph:
    """Compute these storages again for the backward pass; their first lives end with the forward pass.

    `kept`: storages that live on if they are needed for it, rather than to be repeated too. `lates`: of storages that
    are computed again for another part of the step, the place of the first node that uses the repetition. Raises
    GraphError for a storage that the backward pass does not use, or that cannot be computed again.
    """
    copy, _ = step.copied()
    _Repeater(copy, frozenset(storages), collectives, frozenset(kept), lates).repeat()
    return trim(copy)


def repeatable(
    step: StepGraph,
    storages: Iterable[int],
    *,
    collectives: Repeated = "weights",
    lates: Mapping[int, int] | None = None,
) -> list[int]:
    """The storages that `recompute` does not refuse."""
    repeater = _Repeater(step, frozenset(), collectives, lates=lates)
    return [storage for storage in storages if repeater.refusal(storage) is None]


def affordable(
    step: StepGraph,
    limits: Mapping[int, float],
    price: Mapping[fx.Node, float],
    *,
    collectives: Repeated = "weights",
    kept: Collection[int] = (),
) -> dict[int, float]:
    """The storages that may be computed again at once, each within its limit, to what each costs beside the others.

    They are looked at in the order in which they are made. To make one costs the prices of all nodes that lead there
    from what stays; what was found affordable before does not stay. So what is not becomes a checkpoint, from which
    later ones are made.
    """
    chosen: set[int] = set()
    repeater = _Repeater(step, chosen, collectives, frozenset(kept))
    seen: set[fx.Node] = set()
    found: dict[int, float] = {}
    for storage in sorted(limits, key=repeater.born):
        if repeater.refusal(storage) is not None:
            continue
        chain = repeater.chain(storage)
        if sum(price.get(node, 0.0) for node in chain) <= limits[storage]:
            found[storage] = sum(price.get(node, 0.0) for node in chain if node not in seen)
            seen.update(chain)
            chosen.add(storage)
    return found


def regather(step: StepGraph, kept: Callable[[str], bool] = lambda module: False) -> StepGraph:
    """Let go of weights that were gathered or cast after their use in the forward pass, and make them again.

    `kept` says of a module's name whether its weights stay.
    """
    copy, _ = step.copied()
    repeater = _Repeater(copy, frozenset(), "weights")
    made_in = {
        value.storage: node.meta["module"] for node in reversed(list(copy.nodes)) for value in values_of(node)
    }
    repeater.repeat_all(storage for storage in sorted(repeater.weights) if not kept(made_in[storage]))
    return trim(copy)


def layers(
    step: StepGraph, modules: Collection[str], *, weights: bool = True, collectives: bool = False
) -> StepGraph:
    """Keep only what each of these modules is given and what it gives, and compute the rest again.

    `weights`: those that were gathered or cast inside of the module too. `collectives`: the module's own are repeated,
    as wrapping the module in a checkpoint does; else what they gave is kept.
    """
    chosen = inside(step, modules, weights=weights, collectives=collectives)
    given = [storage for storage, module in homes(step, modules).items() if module is None]
    return recompute(step, chosen, collectives=_REPEATED[collectives], kept=given)


def inside(
    step: StepGraph, modules: Collection[str], *, weights: bool = True, collectives: bool = False
) -> list[int]:
    """The storages that are made in the forward pass of one of the modules and used, early, nowhere else."""
    unwanted = set() if weights else of_weights(step, list(step.nodes))
    home = homes(step, modules)
    chosen = [storage for storage, module in home.items() if module is not None and storage not in unwanted]
    return repeatable(step, chosen, collectives=_REPEATED[collectives])


def homes(step: StepGraph, modules: Collection[str]) -> dict[int, str | None]:
    """For each storage that the step makes, the only one of the modules that uses it early; None where there is
    none."""
    nodes = list(step.nodes)
    of = {node: _owner(node.meta["module"], modules) for node in nodes}
    home: dict[int, str | None] = {}
    for node in nodes:
        for value in values_of(node):
            home.setdefault(value.storage, of[node])
    for node in nodes:
        if region_of(node).phase in _EARLY:
            for storage in touched(node):
                if home.get(storage) != of[node]:
                    home[storage] = None
    return home


def _owner(module: str, modules: Collection[str]) -> str | None:
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in modules), None)


class _Repeater:
    """Adds repetitions to a graph, in place."""

    def __init__(
        self,
        step: StepGraph,
        chosen: Set[int],
        collectives: Repeated,
        kept: frozenset[int] = frozenset(),
        lates: Mapping[int, int] | None = None,
    ) -> None:
        self._step, self._chosen, self._collectives = step, chosen, collectives
        self._kept, self._lates = kept, lates or {}
        self._nodes = list(step.nodes)
        self._place = {node: at for at, node in enumerate(self._nodes)}
        self.weights = of_weights(step, self._nodes)
        self._outside = {storage.index for storage in step.storages if storage.name is not None}
        self._returned = {v.storage for node in step.output.all_input_nodes for v in values_of(node)}
        self._users: dict[int, list[int]] = {}
        """Of each storage: the places of the nodes that give, use or write it, in order."""
        self._writers: dict[int, list[int]] = {}
        for at, node in enumerate(self._nodes):
            given, _, changed = effects(node)
            for storage in given | storages_of([node]):
                self._users.setdefault(storage, []).append(at)
            for storage in changed:
                self._writers.setdefault(storage, []).append(at)
        self._again: dict[fx.Node, fx.Node] = {}
        self._moved: dict[int, int] = {}
        """Storage to the one that takes its place."""

    # What may be repeated.

    def born(self, storage: int) -> int:
        """The place of the first node that uses a storage or makes it."""
        return self._users[storage][0]

    def late(self, storage: int) -> int | None:
        """The place of the first node of the backward pass that uses a storage made before; None if none does."""
        if storage in self._lates:
            return self._lates[storage]
        places = self._users.get(storage, [])
        if not places or region_of(self._nodes[places[0]]).phase not in _EARLY:
            return None
        return next((at for at in places if region_of(self._nodes[at]).phase == "backward"), None)

    def refusal(self, storage: int) -> str | None:
        """Why a storage cannot be computed again; None if it can."""
        if storage in self._outside:
            return "it comes from outside of the step"
        if storage in self._returned:
            return "the step returns it"
        late = self.late(storage)
        if late is None:
            return "it is not made in the forward pass and used in the backward pass"
        if any(region_of(self._nodes[at]).phase in _EARLY for at in self._users[storage] if at > late):
            return "a later forward pass uses it"
        for at in self._history(storage, late):
            reason = self._unrepeatable(self._nodes[at], storage, late)
            if reason is not None:
                return reason
        return None

    def _history(self, storage: int, before: int) -> list[int]:
        """The places, before one, of the nodes that give a value in a storage or write to it."""
        found = []
        for at in self._users[storage]:
            if at >= before:
                break
            node = self._nodes[at]
            if storage in writes(node) or any(value.storage == storage for value in values_of(node)):
                found.append(at)
        return found

    def _unrepeatable(self, node: fx.Node, storage: int, before: int) -> str | None:
        """Why a node that makes part of a storage's contents cannot be repeated at a place."""
        if node.target is HOST:
            return f"{node} is what the host said"
        if draws_random(node):
            return f"{node} ({node.target}) draws from a random generator"
        if is_collective(node) and self._collectives == "none":
            return f"{node} ({node.target}) is a collective"
        gathers_weights = {value.storage for value in values_of(node)} <= self.weights
        if is_collective(node) and self._collectives == "weights" and not gathers_weights:
            return f"{node} ({node.target}) is a collective that gathers no weights"
        if writes(node) - {storage}:
            return f"{node} ({node.target}) writes to other memory too"
        at = self._place[node]
        for source in reads(node) - {storage}:
            places = self._writers.get(source, [])
            following = bisect.bisect_right(places, at)
            if following < len(places) and places[following] < before:
                writer = self._nodes[places[following]]
                return f"{node} ({node.target}) read what {writer} has overwritten since"
        return None

    # The repetition.

    def repeat_all(self, storages: Iterable[int]) -> None:
        """Repeat what makes those of the storages that can be computed again."""
        self._chosen = frozenset(storage for storage in storages if self.refusal(storage) is None)
        self.repeat()

    def repeat(self) -> None:
        """Repeat what makes the chosen storages."""
        wanted: list[tuple[int, int]] = []
        for storage in self._chosen:
            reason = self.refusal(storage)
            if reason is not None:
                raise GraphError(f"storage {storage} cannot be computed again: {reason}")
            late = self.late(storage)
            assert late is not None
            wanted.append((late, storage))
        for late, storage in sorted(wanted):
            self._repeat_storage(storage, late)
        for late, storage in wanted:
            self._hand_over(storage, late)
        free = frozenset(self._again.values())
        for node in later(self._step, free):
            self._step.output.prepend(node)

    def _repeat_storage(self, storage: int, late: int) -> None:
        """Insert the nodes that make a storage before the node at `late`, except those that are there."""
        needed = [node for node in self.chain(storage) if node not in self._again]
        with self._step.graph.inserting_before(self._nodes[late]):
            for node in needed:
                self._copy(node, region_of(self._nodes[late]).phase)

    def chain(self, storage: int) -> list[fx.Node]:
        """The nodes, in order, that make a storage from what stays."""
        late = self.late(storage)
        assert late is not None
        needed: set[int] = set()
        pending = [storage]
        seen = {storage}
        while pending:
            history = self._history(pending.pop(), late)
            needed.update(history)
            for at in history:
                if self._nodes[at] in self._again:
                    continue
                given, looked_at, _ = effects(self._nodes[at])
                for other in looked_at | given:
                    if other not in seen and not self._stays(other, late):
                        seen.add(other)
                        pending.append(other)
        return [self._nodes[at] for at in sorted(needed)]

    def _stays(self, storage: int, late: int) -> bool:
        """Whether a storage is used as it is: it is alive at `late`, or cannot be repeated."""
        if storage in self._outside:
            return True
        # One that only came along with another one's repetition may have been written to since by what cannot be.
        if storage in self._moved and all(
            self._nodes[at] in self._again for at in self._history(storage, late)
        ):
            return False
        if storage in self._chosen:
            return False
        if storage in self._kept:
            return True
        if self._users[storage][-1] >= late:
            return True
        return any(self._unrepeatable(self._nodes[at], storage, late) for at in self._history(storage, late))

    def _copy(self, node: fx.Node, phase: Phase) -> None:
        again = copy_node(self._step.graph, node, lambda source: self._again.get(source, source))
        places = self._places(node, self._again)
        for value in values_of(node):
            if value.storage not in places:
                places[value.storage] = self._moved[value.storage] = len(self._step.storages)
                old = self._step.storages[value.storage]
                self._step.storages.append(Storage(len(self._step.storages), old.bytes, old.device))
        again.meta = {
            **moved_meta(node, places),
            "region": replace(region_of(node), phase=phase),
            "recomputed": True,
            "origin": node.meta.get("origin", node.name),
        }
        self._again[node] = again

    def _hand_over(self, storage: int, late: int) -> None:
        """Give what is late the repetition of a storage, in place of the storage."""
        for at in self._users[storage]:
            if at < late:
                continue
            node = self._nodes[at]
            instead = {
                source: self._again[source]
                for source in node.all_input_nodes
                if source in self._again and any(value.storage == storage for value in values_of(source))
            }
            for source, again in instead.items():
                node.replace_input_with(source, again)
            node.meta = moved_meta(node, {storage: self._moved[storage]})

    @staticmethod
    def _places(node: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> dict[int, int]:
        """The storages of a node's arguments to those of what stands in for them."""
        return {
            old.storage: new.storage
            for source in node.all_input_nodes
            for old, new in zip(values_of(source), values_of(instead.get(source, source)), strict=True)
        }
