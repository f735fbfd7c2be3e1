"""The nodes of graphs that a process executes, in the order in which its compiled functions come to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import fx

from hyper_parallel.graph.execute import SourceWriter
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.operator_costs import NOTHING, operator_name

SILENT = NOTHING | {"getitem"}
"""Operators that take no time: memory that is not written to yet, and elements of what another operator gives."""


@contextmanager
def executed(note: Callable[[fx.Node], None]) -> Iterator[None]:
    """Inside, functions that are compiled tell each node before they run it."""
    line = SourceWriter.line

    def noted(self: SourceWriter, node: fx.Node) -> str:
        name = f"note_{id(node)}"
        self.names[name] = lambda: note(node)
        return f"{name}(); {line(self, node)}"

    with mock.patch.object(SourceWriter, "line", noted):
        yield


def name_of(node: fx.Node) -> str:
    """As `graph.lower` names its op."""
    return f"host {node.args[0]}" if node.target is HOST else operator_name(node).removesuffix("_for_cpu")
