"""Liveness analysis: the lifetime and kind of each storage, and live bytes over time.

A storage is born with the first node that gives a value in it and dies after the last one that uses any view of it;
what is read from outside is there from the beginning to the end. One whose memory is given up and taken again (tier
operators) has several lives, and lies in other tiers meanwhile; state that rests in a slot for good has none. The clock
is the place of a node in the graph. The peak is exact for what the graph allocates; memory that a kernel takes and
gives back inside itself is not seen, but for that of collectives of a CPU (`workspaces`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat import gloo
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.ir import (
    Kind,
    StepGraph,
    Value,
    detach,
    is_collective,
    is_wait,
    prefetch,
    values_of,
)
from hyper_parallel.graph.memory_effects import begun, storages_of, touched, writes
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.trace import live_bytes


@dataclass(frozen=True)
class Lifetime:
    """One storage, or one of its lives."""

    storage: int
    bytes: int
    kind: Kind
    born: int
    """Index of the node that makes it; -1 when it comes from outside."""
    died: int
    """Index of the last node that uses it; the number of nodes when it outlives the step."""
    name: str | None
    """Of the input, or of the parameter whose gradient it is."""
    module: str
    phase: str


def lifetimes(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> list[Lifetime]:
    """Every life of every storage that the step uses, in order of birth; `sizes` gives the symbols values."""
    nodes = list(step.nodes)
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    moves: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    """Of each storage: where its memory is taken again (True) or given up."""
    outside = step.outside
    returned = {value.storage for node in step.output.all_input_nodes for value in values_of(node)}
    for at, node in enumerate(nodes):
        value = node.meta.get("value")
        for one in (value,) if type(value) is Value else values_of(node):
            if one.storage not in born:
                born[one.storage] = at
            died[one.storage] = at
        # What a collective was given is held until it has been waited for.
        for storage in touched(node) | (touched(begun(node)) if is_wait(node) else set()):
            died[storage] = at
        if node.target is prefetch or node.target is detach:
            (storage,) = touched(node)
            moves[storage].append((at, node.target is prefetch))
    weights = of_weights(step, nodes)
    away = {slot.storage for slot in step.slots.values() if slot.rest == "away"}
    found = []
    for storage, entry in outside.items():
        if storage in away and not moves[storage]:
            continue
        size = known(step.storages[storage].bytes, sizes or {})
        for since, until in _lives(-1, len(nodes), moves[storage]):
            found.append(Lifetime(storage, size, entry.kind, since, until, entry.name, *_where(nodes, since)))
    for storage, at in sorted(born.items(), key=lambda entry: entry[1]):
        if storage in outside:
            continue
        if (name := step.storages[storage].name) is not None:
            # A constant, which is the graph's own.
            size = known(step.storages[storage].bytes, sizes or {})
            found.append(Lifetime(storage, size, "constant", -1, len(nodes), name, "", ""))
            continue
        node, last = nodes[at], nodes[died[storage]]
        end = len(nodes) if storage in returned else died[storage]
        size = known(step.storages[storage].bytes, sizes or {})
        kind = _kind(step, storage, node, last, weights)
        of = step.gradients.get(storage)
        for since, until in _lives(at, end, moves[storage]):
            found.append(Lifetime(storage, size, kind, since, until, of, *_where(nodes, since)))
    return sorted(found, key=lambda life: life.born) if any(moves.values()) else found


def _where(nodes: list[fx.Node], born: int) -> tuple[str, str]:
    return ("", "") if born < 0 else (nodes[born].meta["module"], region_of(nodes[born]).phase)


def _lives(born: int, died: int, moves: list[tuple[int, bool]]) -> Iterator[tuple[int, int]]:
    """(first, last) node of each stretch in which a storage has memory."""
    # What is taken before it is given up was away as the step began.
    here = not moves or not moves[0][1]
    for at, taken in moves:
        assert taken is not here, f"memory is {'taken' if taken else 'given up'} twice at node {at}"
        if here:
            yield born, at
        born, here = at, taken
    if here:
        yield born, died


def _kind(step: StepGraph, storage: int, born: fx.Node, last: fx.Node, weights: set[int]) -> Kind:
    if storage in step.gradients:
        return "gradient"
    if storage in weights:
        return "parameter"
    early = region_of(born).phase in ("forward", "loss") and not born.meta["recomputed"]
    return "activation" if early and region_of(last).phase == "backward" else "temporary"


def of_weights(step: StepGraph, nodes: list[fx.Node]) -> set[int]:
    """Storages computed from parameters alone: gathered or cast ones."""
    kinds = {storage: entry.kind == "parameter" for storage, entry in step.outside.items()}
    found = set()
    for node in nodes:
        sources = storages_of(node.all_input_nodes)
        alone = bool(sources) and all(kinds.get(storage, False) for storage in sources)
        value, changed = node.meta.get("value"), writes(node)
        if not changed and type(value) is Value:
            kinds[value.storage] = alone and kinds.get(value.storage, True)
            continue
        for storage in storages_of([node]) | changed:
            kinds[storage] = alone and kinds.get(storage, True)
    for storage, alone in kinds.items():
        if alone and step.storages[storage].name is None:
            found.add(storage)
    return found


@dataclass(frozen=True)
class Peak:
    """The worst moment of a step."""

    bytes: int
    """Alive at once, what comes from outside included."""
    at: int
    """Index of the node."""
    by_kind: dict[Kind, int]
    alive: list[Lifetime]
    """Largest first."""


def peak(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> Peak:
    """How many bytes are alive at the worst moment, and which."""
    return peak_of(lifetimes(step, sizes))


def peak_of(found: list[Lifetime]) -> Peak:
    """The worst moment of storages whose lifetimes are given."""
    most, moment = live_bytes.peak((life.born, life.died + 1, life.bytes) for life in found)
    at = -1 if moment is None else moment
    there = sorted((x for x in found if x.born <= at <= x.died), key=lambda x: (-x.bytes, x.storage))
    by_kind: Counter[Kind] = Counter()
    for life in there:
        by_kind[life.kind] += life.bytes
    return Peak(most, at, dict(by_kind), there)


# Workspaces: memory that a runtime takes during a node and that no tensor shows.
#
# On a CPU, tensors are moved by gloo as `compat.gloo` has it:
#
#     all-gather        a flat buffer as large as the result, which is copied out
#     reduce-scatter    what the other ranks sent, as large as what is scattered; in half precision the sum in float32
#     coalesced         of tensors that travel in one message, that message too, and a gather's result before it is cut
# up
#
# They are held until the collective has been waited for. Elsewhere nothing is known to be taken: NCCL's buffers are
# made once, with its communicators.


def workspaces(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> list[Lifetime]:
    """Return the lifetimes of workspaces, memory beside the storages of `lifetimes`; `sizes`: values of symbols.

    Their storage is -1, since they have none.
    """
    nodes = list(step.nodes)
    ends = {begun(node): at for at, node in enumerate(nodes) if is_wait(node)}
    found = []
    for at, node in enumerate(nodes):
        taken = _taken(node, sizes or {})
        if taken:
            where = (node.meta["module"], region_of(node).phase)
            found.append(Lifetime(-1, taken, "temporary", at, ends.get(node, at), None, *where))
    return found


def _taken(node: fx.Node, sizes: Mapping[Any, int]) -> int:
    """Bytes that gloo and its kernels take for a node."""
    if not is_collective(node):
        return 0
    name = str(node.target)
    given = _given(node)
    if "all_gather" in name:
        wholes = list(values_of(node))
    elif "reduce_scatter" in name:
        wholes = given
    else:
        return 0
    if any(value.device.type != _GLOO for value in wholes):
        return 0
    parts, whole = [_bytes(value, sizes) for value in given], [_bytes(value, sizes) for value in wholes]
    taken = sum(whole)
    for bucket in gloo.buckets([(value.dtype, one) for value, one in zip(wholes, whole, strict=True)]):
        if len(bucket) > 1:
            taken += sum(parts[at] for at in bucket)
            taken += sum(whole[at] for at in bucket) if "all_gather" in name else 0
    if "reduce_scatter" in name:
        narrow = [value for value in values_of(node) if value.dtype in gloo.NARROW]
        taken += sum(known(value.elements, sizes) * _SUM for value in narrow)
    return taken


def _given(node: fx.Node) -> list[Value]:
    """The tensors that a collective is given, one after the other."""
    sources: Any = node.args[0]
    nodes = sources if isinstance(sources, list | tuple) else [sources]
    return [value for source in nodes for value in values_of(source)]


def _bytes(value: Value, sizes: Mapping[Any, int]) -> int:
    return value.dtype.itemsize * known(value.elements, sizes)


_SUM = torch.float32.itemsize
"""Of an element, where narrow ones are summed."""
_GLOO = "cpu"
"""Whose tensors gloo moves."""
