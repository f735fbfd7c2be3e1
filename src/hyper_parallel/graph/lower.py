"""A graph as a Program: what one rank runs, on which queue, what it waits for, and what it allocates and frees.

Kernels go to the queue `compute` in the order of the graph, and a collective to the queue `comm:<axis>` of its axis.
It is begun as a runtime begins it: when all that was put on the compute queue before it has ended. Waiting for it is an
op of the compute queue that takes no time, so that whatever comes later waits too. A host point is such an op as well.

Storages are those of `graph.lifetimes`; what comes from outside is resident.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import fx

from hyper_parallel import program
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.effects import begun
from hyper_parallel.graph.groups import is_wait
from hyper_parallel.graph.host import HOST
from hyper_parallel.graph.lifetimes import Lifetime, lifetimes
from hyper_parallel.graph.nouns import Kind, StepGraph
from hyper_parallel.graph.products import operator_name
from hyper_parallel.program import Bytes, Collective, Op, Program
from hyper_parallel.workload.work import Work

_KINDS: dict[Kind, program.Kind] = {
    **{kind: kind for kind in get_args(program.Kind)},
    "buffer": "parameter",
    "constant": "input",
}


def lower(
    steps: Mapping[str, StepGraph],
    classes: Mapping[int, str] | None = None,
    *,
    sizes: Mapping[Any, int] | None = None,
    model_flops: float = 0.0,
    micro_batches: int = 1,
    views: bool = True,
) -> Program:
    """The Program of ranks that run these graphs.

    `steps`: a graph for each rank class. `classes`: every rank's class; may be left out where there is one class, whose
    only rank is 0 then. `sizes`: values of sizes that the data decide. `model_flops`: of the step and all ranks
    together. `views`: ops for views too, which only a host notices.

    Raises KeyError for a size without a value, CaptureError for a collective over an unknown group.
    """
    if classes is None:
        (only,) = steps
        classes = {0: only}
    found = {name: lowered(step, sizes=sizes, views=views) for name, step in steps.items()}
    return Program(
        {name: one.ops for name, one in found.items()},
        dict(classes),
        {name: one.resident for name, one in found.items()},
        model_flops,
        micro_batches,
    )


@dataclass(frozen=True)
class Lowered:
    """One rank class of a Program."""

    ops: tuple[Op, ...]
    nodes: tuple[fx.Node, ...]
    """Of each op, what it was."""
    resident: tuple[Bytes, ...]


def lowered(step: StepGraph, *, sizes: Mapping[Any, int] | None = None, views: bool = True) -> Lowered:
    """The ops of one rank class; arguments and errors as of `lower`."""
    writer = _Writer(step, sizes, views)
    for at, node in enumerate(step.nodes):
        writer.add(at, node)
    return Lowered(writer.ops, writer.nodes, writer.resident)


_Draft = tuple[fx.Node, Work | Collective | None, str, tuple[int, ...], tuple[Bytes, ...]]
"""Of an op: its node, what it does, its queue, what it waits for, what it allocates."""


class _Writer:
    """Writes ops one after the other."""

    def __init__(self, step: StepGraph, sizes: Mapping[Any, int] | None, views: bool) -> None:
        self._written: list[_Draft] = []
        self._freed: dict[int, list[int]] = defaultdict(list)
        """Op to the storages that it frees."""
        self._costs = costs(step, sizes)
        self._views = views
        self._born: dict[int, list[Lifetime]] = defaultdict(list)
        self._died: dict[int, list[int]] = defaultdict(list)
        self._made: dict[int, int] = {}
        """Storage to the op that allocates it."""
        self._begun: dict[fx.Node, int] = {}
        """Collective to its op."""
        self._last = -1
        """The last op on the compute queue."""
        found = lifetimes(step, sizes)
        nodes = sum(1 for _ in step.nodes)
        for life in found:
            if life.born >= 0:
                self._born[life.born].append(life)
            if 0 <= life.died < nodes:
                self._died[life.died].append(life.storage)
        self.resident = tuple(_bytes(life) for life in found if life.born < 0)

    def add(self, at: int, node: fx.Node) -> None:
        """The op of the node at a place of the graph, if it needs one, and what it frees."""
        cost = self._costs.get(node)
        born = tuple(_bytes(life) for life in self._born.get(at, ()) if life.bytes)
        if isinstance(cost, Work) and cost.kind == "view" and not self._views:
            cost = None
        own = None
        if cost is not None or born or is_wait(node) or node.target is HOST:
            own = self._op(node, cost, born)
            for held in born:
                self._made[held.storage] = own
        for storage in self._died.get(at, ()):
            if storage in self._made:
                # Of a node without an op, what was computed last is done with it.
                by = max(self._last if own is None else own, self._made[storage])
                self._freed[by].append(storage)

    def _op(self, node: fx.Node, cost: Work | Collective | None, born: tuple[Bytes, ...]) -> int:
        index = len(self._written)
        after: tuple[int, ...] = ()
        queue = "compute"
        if isinstance(cost, Collective):
            queue = f"comm:{cost.axis}"
            after = (self._last,) if self._last >= 0 else ()
            self._begun[node] = index
        elif is_wait(node):
            after = (self._begun[begun(node)],)
        self._written.append((node, cost, queue, after, born))
        if queue == "compute":
            self._last = index
        return index

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Of each op."""
        return tuple(node for node, *_ in self._written)

    @property
    def ops(self) -> tuple[Op, ...]:
        """What was written."""
        return tuple(
            Op(
                index,
                f"host {node.args[0]}"
                if node.target is HOST
                else operator_name(node).removesuffix("_for_cpu"),
                node.meta["module"],
                node.meta["phase"],
                queue,
                work=cost if isinstance(cost, Work) else None,
                collective=cost if isinstance(cost, Collective) else None,
                after=after,
                allocates=born,
                frees=tuple(self._freed.get(index, ())),
                recomputed=node.meta["recomputed"],
            )
            for index, (node, cost, queue, after, born) in enumerate(self._written)
        )


def _bytes(life: Lifetime) -> Bytes:
    return Bytes(life.storage, life.bytes, _KINDS[life.kind], name=life.name or "")
