"""Memory effects of a node: storages that it reads, writes, or only views.

An operator's schema says which arguments it writes to. Two things no schema says: a collective goes on reading its
arguments, and writing its result, until it has been waited for, so the wait reads and writes them too; and a view reads
nothing. Cache operators change what a storage holds when they give its memory up or bring it back. An update on the
host reads and writes its storages wherever they are, and touches none of them on the device.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.dispatch import mutated_arguments
from hyper_parallel.graph import host_update
from hyper_parallel.graph.collective_groups import is_collective, is_wait
from hyper_parallel.graph.ir import values_of
from hyper_parallel.graph.suspension import HOST
from hyper_parallel.graph.tier_ops import detach, is_cache, prefetch, store


def touched(node: fx.Node) -> set[int]:
    """The storages that a node's arguments lie in, and must be on the device."""
    sources = host_update.host_arguments_of(node) if host_update.is_update(node) else node.all_input_nodes
    return {value.storage for source in sources for value in values_of(source)}


def is_view(node: fx.Node) -> bool:
    """Whether a node only gives memory that is there already another shape."""
    if node.op != "call_function" or is_wait(node) or node.target is HOST or writes(node):
        return False
    results = {value.storage for value in values_of(node)}
    return bool(results) and results <= touched(node)


def reads(node: fx.Node) -> set[int]:
    """The storages whose contents a node needs."""
    if node.op != "output" and (is_view(node) or node.target in (detach, prefetch)):
        return set()
    found = touched(node)
    if is_wait(node):
        found |= touched(begun(node))
    if host_update.is_update(node):
        found |= set(host_update.storages_of(node))
    return found


def writes(node: fx.Node) -> set[int]:
    """The storages that a node changes."""
    if node.op != "call_function":
        return set()
    if "writes" in node.meta:  # what is called has no schema to say it
        return set(node.meta["writes"])
    if is_cache(node):
        return set() if node.target is store else touched(node)
    if host_update.is_update(node):
        return set(host_update.writes_of(node))
    if is_wait(node):
        # Waiting for one result of a coalesced collective brings all of them, and may do so each time.
        return {value.storage for value in values_of(begun(node))}
    target: Any = node.target
    return {
        value.storage
        for argument in mutated_arguments(target, node.args, node.kwargs)
        if isinstance(argument, fx.Node)
        for value in values_of(argument)
    }


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
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    for at, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = (
                node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            )
            return bool(given != 0)
    return True
