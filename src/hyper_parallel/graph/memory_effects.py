"""Memory effects of a node: storages that it reads, writes, or only views; and dead-code elimination by them.

An operator's schema says which arguments it writes to. Two things no schema says: a collective goes on reading its
arguments, and writing its result, until it has been waited for, so the wait reads and writes them too; and a view reads
nothing. Tier operators change what a storage holds when they give its memory up or bring it back. An update on the host
reads and writes its storages wherever they are, and touches none of them on the device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.dispatch import mutated_arguments, once_each, writes_nothing
from hyper_parallel.graph import host_nodes
from hyper_parallel.graph.host_nodes import HOST, is_update
from hyper_parallel.graph.ir import (
    OPERATORS,
    StepGraph,
    Value,
    detach,
    flat_values,
    is_cache,
    is_collective,
    is_wait,
    prefetch,
    store,
)


def touched(node: fx.Node) -> set[int]:
    """The storages that a node's arguments lie in, and must be on the device."""
    sources = host_nodes.host_arguments_of(node) if host_nodes.is_update(node) else node.all_input_nodes
    return storages_of(sources)


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages of the values of some nodes."""
    found: set[int] = set()
    for node in nodes:
        value = node.meta.get("value")
        if isinstance(value, Value):
            found.add(value.storage)
        elif value is not None:
            found |= _of_several(value)
    return found


def _of_several(value: Any) -> frozenset[int]:
    """The storages of a node that gives several values. It is asked for each of them, and in every pass."""
    found = _several.get(id(value))
    if found is None or found[0] is not value:
        if len(_several) >= _MOST:
            _several.clear()
        found = _several[id(value)] = value, frozenset([one.storage for one in flat_values(value)])
    return found[1]


_several: dict[int, tuple[Any, frozenset[int]]] = {}
"""By identity what was asked about last, which is kept."""
_MOST = 1 << 13
_NONE: frozenset[int] = frozenset()


def effects(node: fx.Node) -> tuple[Set[int], Set[int], Set[int]]:
    """`touched`, `reads` and `writes` of a computing node, in less time than the three take."""
    target, meta = node.target, node.meta
    if not _plain(target) or target is HOST or "writes" in meta:
        return touched(node), reads(node), writes(node)
    given: set[int] = set()
    for source in node.all_input_nodes:
        value = source.meta.get("value")
        if type(value) is Value:
            given.add(value.storage)
        elif value is not None:
            given |= _of_several(value)
    value = meta.get("value")
    if type(value) is Value:
        lies_in = value.storage in given
    else:
        results = _of_several(value)
        lies_in = bool(results) and results <= given
    return given, _NONE if lies_in else given, _NONE


def is_view(node: fx.Node) -> bool:
    """Whether a node only gives memory that is there already another shape."""
    if node.op != "call_function" or is_wait(node) or node.target is HOST or writes(node):
        return False
    return _lies_in(node, touched(node))


def _lies_in(node: fx.Node, storages: Set[int]) -> bool:
    """Whether a node gives values, all in these storages."""
    value = node.meta.get("value")
    if isinstance(value, Value):
        return value.storage in storages
    results = _of_several(value)
    return bool(results) and results <= storages


def reads(node: fx.Node) -> set[int]:
    """The storages whose contents a node needs."""
    if node.op == "call_function" and _plain(node.target) and "writes" not in node.meta:
        # Nearly all nodes, and this is asked very often.
        given = storages_of(node.all_input_nodes)
        return set() if node.target is not HOST and _lies_in(node, given) else given
    if node.op != "output" and (is_view(node) or node.target in (detach, prefetch)):
        return set()
    found = touched(node)
    if is_wait(node):
        found |= touched(begun(node))
    if host_nodes.is_update(node):
        found |= set(host_nodes.storages_of(node))
    return found


def writes(node: fx.Node) -> set[int]:
    """The storages that a node changes."""
    if node.op != "call_function":
        return set()
    meta = node.meta
    if "writes" in meta:  # what is called has no schema to say it
        return set(meta["writes"])
    target: Any = node.target
    if _plain(target):
        return set()
    if is_cache(node):
        return set() if target is store else touched(node)
    if host_nodes.is_update(node):
        return set(host_nodes.writes_of(node))
    if is_wait(node):
        # Waiting for one result of a coalesced collective brings all of them, and may do so each time.
        return storages_of([begun(node)])
    arguments = mutated_arguments(target, node.args, node.kwargs)
    return storages_of(argument for argument in arguments if isinstance(argument, fx.Node))


@once_each
def _plain(target: Any) -> bool:
    """Whether nodes of a target change nothing, unless they say so."""
    functional = getattr(target, "namespace", "") == "_c10d_functional"
    return writes_nothing(target) and not functional and target not in (*OPERATORS, host_nodes.update)


def begun(node: fx.Node) -> fx.Node:
    """The collective that a node waits for."""
    while is_wait(node) or node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    assert is_collective(node), f"{node} waits for {node.target}, which is no collective"
    return node


def draws_random(node: fx.Node) -> bool:
    """Whether a node takes random numbers from a generator, so that running it twice gives two results.

    Attention is marked so for its dropout, and draws none where that is zero.
    """
    at, default = _dropout(node.target)
    if at is None:
        return bool(default)
    given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", default)
    return bool(given != 0)


@once_each
def _dropout(target: Any) -> tuple[int | None, Any]:
    """For an operator that draws as its `dropout_p` says, the argument's place and default; of another one, None and
    whether it draws."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return None, False
    for at, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            return at, argument.default_value
    return None, True


def has_effect(node: fx.Node) -> bool:
    """Whether running a node does more than giving its value.

    It writes, talks to other ranks or to the host, moves memory, or draws random numbers, so that the next draw gets
    others.
    """
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    mutable = schema is not None and schema.is_mutable
    return (
        mutable
        or target is HOST
        or is_cache(node)
        or is_update(node)
        or draws_random(node)
        or getattr(target, "namespace", "") == "_c10d_functional"
    )


def trim(step: StepGraph) -> StepGraph:
    """Take out, in place, the nodes without effect whose value is not used. Returns the same graph."""
    sizes = set(step.sizes.values())
    for node in reversed(list(step.graph.nodes)):
        if not node.users and not has_effect(node):
            step.graph.erase_node(node)
            if node in sizes:
                step.sizes = {symbol: kept for symbol, kept in step.sizes.items() if kept is not node}
    return step
