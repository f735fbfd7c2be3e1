"""Prints a graph as text, and what a pass changed.

A line has the node's name, its operator, the shapes that it gives, its phase and module, and the bytes that it brings
to life and lets go: ``+`` born with it, ``-`` freed after it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hyper_parallel.graph import host_update
from hyper_parallel.graph.ir import StepGraph, Value, values_of
from hyper_parallel.graph.liveness import lifetimes, peak
from hyper_parallel.graph.regions import region_of
from hyper_parallel.graph.tier_ops import is_cache
from hyper_parallel.units import format_bytes

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


def text(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> str:
    """The whole graph, then its peak. `sizes` gives the symbols values."""
    most = peak(step, sizes)
    return "\n".join([*lines(step, sizes), f"peak {format_bytes(most.bytes)} at node {most.at}"])


def lines(step: StepGraph, sizes: Mapping[Any, int] | None = None) -> list[str]:
    """One line a node."""
    born: Counter[int] = Counter()
    freed: Counter[int] = Counter()
    for life in lifetimes(step, sizes):
        born[life.born] += life.bytes
        freed[life.died] += life.bytes
    return [_line(node, born[at], freed[at]) for at, node in enumerate(step.nodes)]


def changes(
    before: StepGraph, after: StepGraph, sizes: Mapping[Any, int] | None = None, around: int = 2
) -> str:
    """What a pass did: ``-`` lines that are gone and ``+`` lines that are new (a move is both), and both peaks.

    `around` lines are shown on each side of a change.
    """
    old, new = lines(before, sizes), lines(after, sizes)
    shown = list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=around))
    was, now = peak(before, sizes).bytes, peak(after, sizes).bytes
    count = f"{len(old)} nodes, {len(new)} after"
    return "\n".join([*shown, f"{count}; peak {format_bytes(was)}, {format_bytes(now)} after"])


def _line(node: fx.Node, born: int, freed: int) -> str:
    shapes = " ".join(_shape(value) for value in values_of(node)) or "-"
    where = ".".join(part for part in (region_of(node).phase, node.meta["module"]) if part)
    again = " again" if node.meta["recomputed"] else ""
    memory = (f" +{format_bytes(born)}" if born else "") + (f" -{format_bytes(freed)}" if freed else "")
    arguments = ", ".join(source.name for source in node.all_input_nodes)
    if is_cache(node):
        arguments += f", {node.args[2]}:{node.args[1]}"
    elif host_update.is_update(node):
        called = ", ".join(
            str(getattr(call.operator, "__name__", "call")) for call in host_update.calls_of(node)
        )
        slots = " ".join(str(slot) for slot in host_update.slots_of(node))
        arguments += f", {host_update.tier_of(node)}:{slots}: {called}"
    return f"{node.name} = {_operator(node)}({arguments}) {shapes} {where}{again}{memory}"


def _operator(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)) if callable(node.target) else str(node.target)


def _shape(value: Value) -> str:
    return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{','.join(str(size) for size in value.shape)}]"
