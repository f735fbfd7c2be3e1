"""Lowering: a StepGraph to a Trace of priced operations on queues, with dependencies and allocations.

Kernels go to the queue `compute` in the order of the graph, and a collective to the queue `comm:<axis>` of its axis.
It is begun as a runtime begins it: when all that was put on the compute queue before it has ended. Waiting for it is an
op of the compute queue that takes no time, so that whatever comes later waits too. A host point is such an op as well.
A copy between tiers is begun and waited for like a collective, on the queue of its direction, `copy:device>host`. A
prefetch is two ops: memory is taken where the graph says so, before the copy has its turn. An update goes to the queue
`host`: it waits for what the device had been given before and for the copies to its slots, and copies from them for it.

Storages are those of `graph.liveness`, each life one; what comes from outside is resident. So is a slot in another
tier that outlives the step; others are there from their first store to the wait for their last copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import fx

from hyper_parallel import trace
from hyper_parallel.graph import host_nodes
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import Kind, StepGraph, is_cache, is_wait, prefetch, slot_of, store
from hyper_parallel.graph.ir import wait as wait_for
from hyper_parallel.graph.liveness import Lifetime, lifetimes
from hyper_parallel.graph.memory_effects import begun
from hyper_parallel.graph.operator_costs import PHASES, fused_costs, operator_name
from hyper_parallel.graph.step_context import current_step, region_of
from hyper_parallel.trace import Bytes, Collective, Op, Trace
from hyper_parallel.workload.work import Work

_KINDS: dict[Kind, trace.Kind] = {
    **{kind: kind for kind in get_args(trace.Kind)},
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
) -> Trace:
    """The Trace of ranks that run these graphs.

    `steps`: a graph for each rank class. `classes`: every rank's class; may be left out where there is one class, whose
    only rank is 0 then. `sizes`: values of sizes that the data decide. `model_flops`: of the step and all ranks
    together. `views`: ops for views too, which only a host notices.

    Raises KeyError for a size without a value, CaptureError for a collective over an unknown group.
    """
    if classes is None:
        (only,) = steps
        classes = {0: only}
    found = {name: lowered(step, sizes=sizes, views=views) for name, step in steps.items()}
    return Trace(
        {name: one.ops for name, one in found.items()},
        dict(classes),
        {name: one.resident for name, one in found.items()},
        model_flops,
        micro_batches,
    )


@dataclass(frozen=True)
class Lowered:
    """One rank class of a Trace."""

    ops: tuple[Op, ...]
    nodes: tuple[fx.Node, ...]
    """Of each op, what it was."""
    resident: tuple[Bytes, ...]


def lowered(
    step: StepGraph,
    *,
    sizes: Mapping[Any, int] | None = None,
    views: bool = True,
    lives: list[Lifetime] | None = None,
    fused: bool = False,
    priced: Mapping[fx.Node, Work | Collective] | None = None,
) -> Lowered:
    """The ops of one rank class; arguments and errors as of `lower`.

    `lives`, `priced`: the step's lifetimes and costs where they are known already. `fused`: priced as compiled
    (`graph.operator_costs`), else the phases that `current_step().fused` names.
    """
    if priced is None:
        priced = costs(step, sizes)
    phases = PHASES if fused else current_step().fused
    if phases:
        priced = fused_costs(step, priced, sizes, phases)
    writer = _Writer(step, priced, views, lifetimes(step, sizes) if lives is None else lives)
    for at, node in enumerate(step.nodes):
        writer.add(at, node)
    return Lowered(writer.ops, writer.nodes, writer.resident)


_Draft = tuple[fx.Node, Work | Collective | None, str, tuple[int, ...], tuple[Bytes, ...]]
"""Of an op: its node, what it does, its queue, what it waits for, what it allocates."""


class _Writer:
    """Writes ops one after the other."""

    def __init__(
        self,
        step: StepGraph,
        priced: Mapping[fx.Node, Work | Collective],
        views: bool,
        found: list[Lifetime],
    ) -> None:
        self._written: list[_Draft] = []
        self._freed: dict[int, list[int]] = defaultdict(list)
        """Op to the storages that it frees."""
        self._costs = priced
        self._views = views
        self._born: dict[int, list[tuple[int, Lifetime]]] = defaultdict(list)
        """Node to the numbers of the storages that come to life with it, as a Trace counts them."""
        self._died: dict[int, list[int]] = defaultdict(list)
        self._made: dict[int, int] = {}
        """Storage to the op that allocates it."""
        self._copied: dict[int, int] = {}
        """Slot to the op of its last copy."""
        self._updated: dict[int, int] = {}
        """Slot to the op of its last update."""
        self._begun: dict[fx.Node, int] = {}
        """Collective to its op."""
        self._last = -1
        """The last op on the compute queue."""
        self._slots = _Slots(step, found)
        nodes = sum(1 for _ in step.nodes)
        numbers: dict[int, int] = {}
        more = self._slots.first + max(step.slots, default=-1) + 1
        for life in found:
            # Each further life of a storage has its own number.
            number = more + len(numbers) if life.storage in numbers else life.storage
            numbers[number] = life.storage
            if life.born >= 0:
                self._born[life.born].append((number, life))
            else:
                self._made[number] = -1
            if 0 <= life.died < nodes:
                self._died[life.died].append(number)
        self.resident = (
            *(_bytes(life, life.storage) for life in found if life.born < 0),
            *self._slots.resident(),
        )

    def add(self, at: int, node: fx.Node) -> None:
        """The op of the node at a place of the graph, if it needs one, and what it frees."""
        cost = self._costs.get(node)
        born = tuple(_bytes(life, number) for number, life in self._born.get(at, ()) if life.bytes)
        if isinstance(cost, Work) and cost.kind == "view" and not self._views:
            cost = None
        own = None
        if is_cache(node):
            own = self._cache(node, born)
        elif host_nodes.is_update(node):
            own = self._update(node, cost)
        elif cost is not None or born or is_wait(node) or node.target is HOST:
            own = self._op(node, cost, born)
        if own is not None:
            for held in born:
                self._made[held.storage] = own
        for storage in self._died.get(at, ()):
            if storage in self._made:
                # Of a node without an op, what was computed last is done with it.
                by = max(self._last if own is None else own, self._made[storage])
                self._freed[by].append(storage)

    def _op(self, node: fx.Node, cost: Work | Collective | None, born: tuple[Bytes, ...]) -> int:
        after: tuple[int, ...] = ()
        queue = "compute"
        if isinstance(cost, Collective):
            queue = f"comm:{cost.axis}"
            after = (self._last,) if self._last >= 0 else ()
            self._begun[node] = len(self._written)
        elif is_wait(node):
            after = (self._begun[begun(node)],)
        return self._write(node, cost, queue, after, born)

    def _cache(self, node: fx.Node, born: tuple[Bytes, ...]) -> int:
        """The ops of a cache operator; the last one on the compute queue."""
        slot = slot_of(node)
        if node.target is wait_for:
            copied = self._copied.get(slot)
            # What was begun in the step before is taken to be over.
            own = self._write(node, None, "compute", () if copied is None else (copied,), born)
            if self._slots.last.get(slot) is node:
                self._freed[own].append(self._slots.first + slot)
            return own
        if node.target not in (store, prefetch):
            return self._write(node, None, "compute", (), born)
        there = self._slots.tier(slot)
        way = f"device>{there}"
        if node.target is prefetch:
            self._write(node, None, "compute", (), born)
            way, born = f"{there}>device", ()
        last = self._last
        begun = self._slots.begun(slot) if node.target is store else ()
        work = Work("copy", read=float(self._slots.bytes(slot)), op="copy")
        after = sorted({*((last,) if last >= 0 else ()), self._updated.get(slot, last)} - {-1})
        self._copied[slot] = self._write(node, work, f"copy:{way}", tuple(after), (*born, *begun))
        return last if last >= 0 else self._copied[slot]

    def _update(self, node: fx.Node, cost: Work | Collective | None) -> int:
        """The op of an update on the host; what was begun in the step before is taken to be over."""
        slots = host_nodes.slots_of(node)
        copied = {self._copied[slot] for slot in slots if slot in self._copied}
        own = self._write(node, cost, "host", tuple(sorted({self._last, *copied} - {-1})), ())
        for slot in slots:
            self._updated[slot] = own
            if self._slots.last.get(slot) is node:
                self._freed[own].append(self._slots.first + slot)
        return own

    def _write(
        self,
        node: fx.Node,
        cost: Work | Collective | None,
        queue: str,
        after: tuple[int, ...],
        born: tuple[Bytes, ...],
    ) -> int:
        index = len(self._written)
        self._written.append((node, cost, queue, after, born))
        if queue == "compute":
            self._last = index
        return index

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of each op."""
        return tuple(node for node, *_ in self._written)

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(
            Op(
                index,
                f"host {node.args[0]}"
                if node.target is HOST
                else operator_name(node).removesuffix("_for_cpu"),
                node.meta["module"],
                region_of(node).phase,
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


class _Slots:
    """The slots of a step as storages of other tiers."""

    def __init__(self, step: StepGraph, found: list[Lifetime]) -> None:
        self._slots = step.slots
        self.first = len(step.storages)
        """The number of slot 0 as a storage."""
        # What is never on the device has no life there.
        kinds = {storage: entry.kind for storage, entry in step.outside.items()}
        kinds |= {life.storage: life.kind for life in found}
        self._bytes = {
            slot: Bytes(
                self.first + slot,
                at.bytes,
                _KINDS[kinds.get(at.storage, "temporary")],
                at.tier,
                step.storages[at.storage].name or "",
            )
            for slot, at in step.slots.items()
        }
        self._there = {slot for slot, at in step.slots.items() if at.rest != "step"}
        self.last: dict[int, fx.Node] = {
            slot: node
            for node in (step.nodes if step.slots else ())
            for slot in _done_with(node)
            if slot not in self._there
        }
        """Of a slot that the step is done with: the wait for its last copy, or its update."""

    def resident(self) -> Iterator[Bytes]:
        """Bytes that lie there as the step begins."""
        return (self._bytes[slot] for slot in sorted(self._there))

    def begun(self, slot: int) -> tuple[Bytes, ...]:
        """Bytes that a store allocates."""
        if slot in self._there:
            return ()
        self._there.add(slot)
        return (self._bytes[slot],)

    def tier(self, slot: int) -> str:
        return self._slots[slot].tier

    def bytes(self, slot: int) -> int:
        return self._slots[slot].bytes


def _done_with(node: fx.Node) -> tuple[int, ...]:
    """The slots that a node may be the last to need."""
    if host_nodes.is_update(node):
        return host_nodes.slots_of(node)
    return (slot_of(node),) if node.target is wait_for else ()


def _bytes(life: Lifetime, number: int) -> Bytes:
    return Bytes(number, life.bytes, _KINDS[life.kind], name=life.name or "")
