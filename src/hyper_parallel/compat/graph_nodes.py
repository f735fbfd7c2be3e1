"""Appending nodes to an `fx.Graph` in a fraction of the time of `Graph.create_node`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.fx.node import map_arg


def append_call(graph: fx.Graph, name: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """A `call_function` node at the graph's insert point, whose arguments hold no symbolic numbers.

    What `Graph.create_node` does, without its walk through the arguments in search of these.
    """
    return append_node(graph, name, "call_function", target, args, kwargs)


def append_copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node of another graph at this graph's insert point, with its name and a `meta` of its own.

    `copies`: of the nodes that are its arguments.
    """
    copy_of = copies.__getitem__
    args = map_arg(node.args, copy_of)
    kwargs = map_arg(node.kwargs, copy_of) if node.kwargs else node.kwargs
    made = append_node(graph, node.name, node.op, node.target, args, kwargs)
    set_meta(made, dict(node.meta))
    return made


def copy_node(graph: fx.Graph, node: fx.Node, source_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """`graph.node_copy(node, source_of)`, named as PyTorch 2.13 does (`_unique_name`)."""
    args = map_arg(node.args, source_of)
    kwargs = map_arg(node.kwargs, source_of)
    name = _unique_name(graph._graph_namespace, node.name)
    graph._graph_namespace._used_names.discard(name)  # which `create_node` takes itself
    made = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    made.meta = dict(node.meta)
    return made


def set_meta(node: fx.Node, meta: dict[str, Any]) -> None:
    """`node.meta = meta`, without the graph's tables being written anew, as for any attribute that is set."""
    object.__setattr__(node, "meta", meta)


def append_node(graph: fx.Graph, name: str, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """A node of any kind at the graph's insert point, as of `append_call`."""
    name = _unique_name(graph._graph_namespace, name)
    node = fx.Node(graph, name, op, target, args, kwargs)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


_numbered: dict[str, tuple[str, int]] = {}
"""Names that end with a number and are legal, to what stands before it, and the number. Passes copy the same names
again and again."""
_MOST = 1 << 20


def _unique_name(namespace: Any, name: str) -> str:
    """What `_Namespace.create_name` of PyTorch 2.13 answers and leaves in the namespace, in less time.

    Of a name that is taken and ends with a number, the next is counted from the last of its base; PyTorch 2.11 counts
    from 1, and answers names that other nodes will be copied with.
    """
    parts = _numbered.get(name)
    if parts is None:
        base, _, number = name.rpartition("_")
        if not (
            base
            and number.isdecimal()
            and number == str(int(number))
            and name.isascii()
            and name.isidentifier()
        ):
            made: str = namespace.create_name(name, None)
            return made
        if len(_numbered) >= _MOST:
            _numbered.clear()
        parts = _numbered[name] = base, int(number)
    base, count = parts
    if name in namespace._used_names:
        count = namespace._base_count.get(base, 0)
        while name in namespace._used_names:
            count += 1
            name = f"{base}_{count}"
    namespace._used_names.add(name)
    namespace._base_count[base] = count
    return name
