"""Data flow and dependencies of a graph: which nodes a node uses, and which must run before it.

Data flow (`data_sources`) says nothing of order: nodes that only have to run before another one, such as the collective
before it in its group, are no part of what it needs. `dependencies` has these too, with the hazards of memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import StepGraph, Value, group_name, is_cache, is_collective, values_of
from hyper_parallel.graph.memory_effects import draws_random, effects, is_view, reads, touched, writes

Needs = Mapping[fx.Node, Collection[fx.Node]]
"""Each computing node to the ones whose results it uses (`data_sources`)."""


def needed(needs: Needs, wanted: Collection[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The computing nodes that the wanted ones need, without what only those at which to `stop` need."""
    left = [node for node in wanted if node in needs and node not in stop]
    found: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(source for source in needs[node] if source not in stop)
    return found


def seen_through(node: fx.Node) -> fx.Node:
    """The node whose result a chain of views shows: others may show it by other views."""
    while is_view(node):
        source = node.all_input_nodes[0]
        if source.op != "call_function" or not isinstance(source.meta.get("value"), Value):
            break
        node = source
    return node


def stops(needs: Needs, given: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The given nodes, and those that only fill their memory before: a gather, for the weight that is a view of it.

    What uses a given node touches that memory too, and so needs those that fill it, by `data_sources`.
    """
    graphs = {node.graph for node in given}
    lasting = {
        value.storage
        for graph in graphs
        for node in graph.nodes
        if node.op == "placeholder"
        for value in values_of(node)
    }
    place = {node: at for at, node in enumerate(needs)}
    last: dict[int, int] = {}
    for node in given:
        for value in values_of(node):
            if value.storage not in lasting and node in place:
                last[value.storage] = max(place[node], last.get(value.storage, 0))
    derived, found = set(given), set(given)
    for node, at in place.items():
        if node in given:
            continue
        storages = {value.storage for value in values_of(node)} | set(writes(node))
        if any(
            source in derived and not storages.isdisjoint(value.storage for value in values_of(source))
            for source in node.all_input_nodes
        ):
            derived.add(node)
            continue
        if storages and all(at <= last.get(storage, -1) for storage in storages):
            found.add(node)
    return frozenset(found)


def sources(nodes: Collection[fx.Node]) -> set[fx.Node]:
    return {source for node in nodes for source in node.all_input_nodes}


def data_sources(step: StepGraph) -> dict[fx.Node, frozenset[fx.Node]]:
    """Each computing node to the nodes that have computed what it uses: its arguments, and the last write to each
    storage that it touches."""
    wrote: dict[int, fx.Node] = {}
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in step.nodes:
        before = {source for source in node.all_input_nodes if source.op == "call_function"}
        before |= {wrote[storage] for storage in touched(node) if storage in wrote}
        found[node] = frozenset(before - {node})
        wrote.update(dict.fromkeys(writes(node), node))
    return found


# Dependencies that a graph's edges do not show: memory hazards, collective order, suspension points.
#
# A node must run after
#
# - the nodes that compute its arguments;
# - the last write to each storage that it reads, through whatever view (read after write);
# - every read of a storage that it writes, since the last write, and that write (write after read, write after write);
# - the collective before it in the same process group, since the other ranks run them in that order;
# - the node before it that draws from the same random generator;
# - host points, if it writes what outlives the step: nothing is updated before the host has looked at what it asked to
#   see. Host points keep their order, and run after the updates that were before them. Moving it is no update;
# - the host point before it, if it reads a number from a tensor: what is as large as that number is not there before
# the
#   host has looked.
#
# Any order that keeps these computes the same bits.


def dependencies(step: StepGraph, free: Collection[fx.Node] = ()) -> dict[fx.Node, set[fx.Node]]:
    """Each computing node to the ones that must run before it; what follows from these is left out.

    `free`: collectives whose place among the others of their group has yet to be chosen, on every rank alike.
    """
    found = _Found(step, free)
    for node in step.nodes:
        found.add(node)
    return found.needs


def check_order(
    step: StepGraph,
    order: Sequence[fx.Node],
    free: Collection[fx.Node] = (),
    needs: Mapping[fx.Node, Collection[fx.Node]] | None = None,
) -> None:
    """Raise GraphError unless the step's nodes may run in this order; `free` as of `dependencies`.

    `needs`: the step's dependencies where they are known already.
    """
    needs = dependencies(step, free) if needs is None else needs
    place = {node: at for at, node in enumerate(order)}
    if len(place) != len(order) or place.keys() != needs.keys():
        raise GraphError(
            f"an order of {len(order)} nodes ({len(place)} different) is not one of the graph's {len(needs)}; "
            "give each computing node of the graph once"
        )
    for node, before in needs.items():
        late = {other for other in before if place[other] > place[node]}
        if late:
            # The first of them as the step has it, so that the same mistake has the same text in every process.
            other = next(one for one in needs if one in late)
            raise GraphError(
                f"{node} ({node.target}) may not run before {other} ({other.target}): {_why(node, other)}"
            )


def reorder(
    step: StepGraph,
    order: Sequence[fx.Node],
    free: Collection[fx.Node] = (),
    needs: Mapping[fx.Node, Collection[fx.Node]] | None = None,
) -> StepGraph:
    """The same graph with its computing nodes in another order; `free` and `needs` as of `check_order`.

    Raises GraphError when that order is not legal.
    """
    check_order(step, order, free, needs)
    return step.copied(order)[0]


def arrange(step: StepGraph, order: Iterable[fx.Node]) -> None:
    """Put the computing nodes of a graph that is being made into an order, which is legal."""
    end = step.output
    for node in order:
        end.prepend(node)


def later(step: StepGraph, movable: Collection[fx.Node]) -> list[fx.Node]:
    """The step's order with some nodes as late as what needs them allows; the others stay where they are.

    Collectives among the movable ones find a new place among those of their group, so every rank must move the same.
    """
    nodes = list(step.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    # From the end: when a movable node is reached, all that needs it has its place.
    wanted: dict[fx.Node, int] = {}
    needs = dependencies(step, movable)
    for node in reversed(nodes):
        place[node] = wanted.get(node, place[node])
        for other in needs[node]:
            if other in movable:
                wanted[other] = min(place[node], wanted.get(other, place[node]))
    return sorted(nodes, key=lambda node: (place[node], node not in movable))


class _Found:
    """Walks the nodes in order and remembers who touched what last."""

    def __init__(self, step: StepGraph, free: Collection[fx.Node]) -> None:
        # Looked up for each collective: a list of them would be walked each time.
        self._free = frozenset(free)
        self.needs: dict[fx.Node, set[fx.Node]] = {}
        self._lasting = {storage.index for storage in step.storages if storage.name is not None}
        self._wrote: dict[int, fx.Node] = {}
        self._read: dict[int, list[fx.Node]] = {}
        self._chains: dict[str, fx.Node] = {}
        self._updates: list[fx.Node] = []
        """Writes to what outlives the step, since the last host point."""

    def add(self, node: fx.Node) -> None:
        needs = {source for source in node.all_input_nodes if source.op == "call_function"}
        _, looked_at, changed = effects(node)
        wrote, read = self._wrote, self._read
        for storage in looked_at | changed if changed else looked_at:
            if storage in wrote:
                needs.add(wrote[storage])
        for storage in changed:
            needs.update(read.pop(storage, ()))
            wrote[storage] = node
        for storage in looked_at - changed if changed else looked_at:
            known = read.get(storage)
            if known is None:
                read[storage] = [node]
            else:
                known.append(node)
        if is_collective(node) and node not in self._free:
            self._chain(node, f"group {group_name(node)}", needs)
        if draws_random(node):
            self._chain(node, "random", needs)
        if node.target is HOST:
            needs.update(self._updates)
            self._updates.clear()
            self._chain(node, "host", needs)
        elif node.target is _NUMBER and "host" in self._chains:
            needs.add(self._chains["host"])
        elif changed & self._lasting and not is_cache(node):
            self._updates.append(node)
            if "host" in self._chains:
                needs.add(self._chains["host"])
        needs.discard(node)
        self.needs[node] = needs

    def _chain(self, node: fx.Node, name: str, needs: set[fx.Node]) -> None:
        if name in self._chains:
            needs.add(self._chains[name])
        self._chains[name] = node


_NUMBER = torch.ops.aten._local_scalar_dense.default


def _why(node: fx.Node, other: fx.Node) -> str:
    if other in node.all_input_nodes:
        return "it uses its result"
    if node.target is _NUMBER and other.target is HOST:
        return "the host looks before it reads how large something is"
    if node.target is HOST or other.target is HOST:
        return "what the host is asked comes before the updates that follow it, and after those before it"
    if writes(node) & writes(other):
        return "both write to the same memory"
    if writes(other) & reads(node):
        return "it reads what that one writes"
    if writes(node) & reads(other):
        return "it writes what that one still reads"
    return "other ranks, or the random generator, take them in this order"
