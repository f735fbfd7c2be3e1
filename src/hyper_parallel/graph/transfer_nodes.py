"""Transfers between ranks as host points, so that liveness and planners see when their memory is in use.

    buffer = host("post")                  memory that a value will be received in
    host("wait", [buffer])                 what was received is in it: the node writes to it
    sent = host("send", [value])           the value is being sent from its memory
    host("wait", [sent, value])            its memory is free

From the node that begins a transfer to the wait for it the memory is in use, by the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from hyper_parallel.graph.suspension import HOST, HostPoint

BEGINS = (HostPoint.POST, HostPoint.SEND)
"""The points at which a transfer begins."""


def transfer_ends(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """Each node that begins a transfer, and the place of the wait for it."""
    for at, node in enumerate(nodes):
        if node.target is HOST and node.args[0] == HostPoint.WAIT:
            yield from ((one, at) for one in node.all_input_nodes if _begins(one))


def _begins(node: fx.Node) -> bool:
    return node.target is HOST and node.args[0] in BEGINS
