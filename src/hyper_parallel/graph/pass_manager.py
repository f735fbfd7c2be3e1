"""Pass manager: graph passes with declared conflicts, checked before and validated after.

A pass never changes the graph that it is given. What validation proves of its result: the graph is well formed; inputs
and outputs are the same; and every node that was there before still reads what the same writes left in memory, and
still runs after everything that it had to run after. A node that a pass makes again from another one is held to the
same (`meta["origin"]`, the name of the node that it repeats), and is of the same layer and micro-batch. Of a storage
whose memory was given up nothing is read before it was brought back, nothing changes or frees what a copy still reads,
and between two steps everything is where its slot says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph import host_nodes
from hyper_parallel.graph.dependencies import dependencies
from hyper_parallel.graph.ir import (
    StepGraph,
    detach,
    is_cache,
    is_collective,
    is_wait,
    prefetch,
    slot_of,
    store,
    values_of,
)
from hyper_parallel.graph.memory_effects import begun, effects, is_view, touched
from hyper_parallel.graph.step_context import region_of

SCHEDULE = "schedule"
"""What a pass provides that chooses the order of collectives too: the same on every rank, by what all ranks know."""
MOVED = "offload"
"""What a pass provides that moves storages, for the bytes that all layers hold: what it makes has no short step."""
ACROSS_LAYERS = frozenset({SCHEDULE, MOVED})
"""What passes provide that gather a layer ahead, or move storages: after them layers that were alike no longer are."""

Contents = dict[str, tuple[str, dict[int, str]]]
"""Each node's name to its origin, and to the last write to each storage that it reads."""


class Pass(Protocol):
    @property
    def name(self) -> str:
        """The name in messages."""

    @property
    def provides(self) -> frozenset[str]:
        """Properties that later passes may rely on."""

    @property
    def conflicts(self) -> frozenset[str]:
        """Properties that no earlier pass may have provided."""

    def __call__(self, step: StepGraph) -> StepGraph:
        """The rewritten graph; `step` stays as it is."""


@dataclass(frozen=True)
class Rewrite:
    """A function of a graph as a pass."""

    name: str
    does: Callable[[StepGraph], StepGraph]
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()

    def __call__(self, step: StepGraph) -> StepGraph:
        return self.does(step)


@dataclass(frozen=True)
class Ran:
    """The result of one pass on a graph."""

    name: str
    before: StepGraph
    after: StepGraph


def run_passes(step: StepGraph, passes: Sequence[Pass]) -> list[Ran]:
    """Run passes one after the other; the last one's `after` is the result.

    Raises GraphError when a pass conflicts with what one before it provides, before any has run; and when what a pass
    made is not the same step.
    """
    check_declared(passes)
    ran: list[Ran] = []
    known: Contents | None = None
    for one in passes:
        before = ran[-1].after if ran else step
        after = one(before)
        try:
            known = _validated(before, after, SCHEDULE in one.provides, known)
        except GraphError as error:
            raise GraphError(f"pass {one.name!r}: {error}") from None
        # A pass that searches an order gives the short step that of the whole one by itself.
        if before.short is not None and after.short is None and MOVED not in one.provides:
            after.short = partial(_of_short, one, before.short)
        ran.append(Ran(one.name, before, after))
    return ran


def _of_short(one: Pass, short: Callable[[], StepGraph]) -> StepGraph:
    return one(short())


def rewritten(step: StepGraph, passes: Sequence[Pass]) -> StepGraph:
    """The graph after the passes. Raises GraphError as `run_passes` does."""
    ran = run_passes(step, passes)
    return ran[-1].after if ran else step


def check_declared(passes: Iterable[Pass]) -> None:
    """Raise GraphError where a pass conflicts with what one before it provides."""
    provided: dict[str, str] = {}
    for one in passes:
        for known in sorted(one.conflicts & provided.keys()):
            raise GraphError(
                f"pass {one.name!r} conflicts with {known}, which pass {provided[known]!r} provides; "
                f"put {one.name!r} before it, or leave one of the two out"
            )
        provided.update(dict.fromkeys(sorted(one.provides), one.name))


def validate(before: StepGraph, after: StepGraph, *, chosen: bool = False) -> None:
    """Raise GraphError unless `after` is well formed and computes what `before` does, as far as order can tell.

    `chosen`: the collectives of a group may be in another order than before.
    """
    _validated(before, after, chosen, None)


def _validated(before: StepGraph, after: StepGraph, chosen: bool, known: Contents | None) -> Contents:
    """`validate`, with what is known of the contents of `before`, and returns those of `after`."""
    if after is before:
        return _writers_seen(before) if known is None else known
    try:
        after.graph.lint()
    except RuntimeError as error:
        raise GraphError(f"the graph is not well formed: {error}") from None
    _same_ends(before, after)
    _check_meta(before, after)
    _same_order(before, after, [node for node in before.nodes if is_collective(node)] if chosen else [])
    return _same_contents(_writers_seen(before) if known is None else known, _writers_seen(after))


def _same_ends(before: StepGraph, after: StepGraph) -> None:
    if before.inputs != after.inputs:
        raise GraphError("the inputs are not the same as before")
    if before.outputs != after.outputs:
        raise GraphError(f"the outputs are {after.outputs}, and were {before.outputs}")

    def returned(step: StepGraph) -> list[tuple[object, ...]]:
        return [
            (value.shape, value.dtype) for node in step.output.all_input_nodes for value in values_of(node)
        ]

    if returned(before) != returned(after):
        raise GraphError("an output has another shape or dtype than before")


def _check_meta(before: StepGraph, after: StepGraph) -> None:
    known = {node.name: region_of(node) for node in before.nodes}
    for node in after.nodes:
        missing = {"region", "module", "recomputed"} - node.meta.keys()
        if missing:
            raise GraphError(f"{node} ({node.target}) lacks meta {', '.join(sorted(missing))}")
        region = region_of(node)
        origin = known.get(node.meta.get("origin", node.name), region)
        if (region.layer, region.micro_batch) != (origin.layer, origin.micro_batch):
            raise GraphError(f"{node} ({node.target}) is in {region}, and what it repeats in {origin}")


def _same_order(before: StepGraph, after: StepGraph, free: Collection[fx.Node]) -> None:
    place = {node.name: at for at, node in enumerate(after.nodes)}
    for node in after.nodes:
        for call in host_nodes.calls_of(node) if host_nodes.is_update(node) else ():
            place[call.name] = place[node.name]
    for node, needs in dependencies(before, free).items():
        for other in needs:
            if place.get(other.name, -1) > place.get(node.name, len(place)):
                raise GraphError(f"{node} ({node.target}) now runs before {other} ({other.target})")


def _same_contents(before: Contents, after: Contents) -> Contents:
    """Raise GraphError unless every node still reads what the same writes left in memory; else `after`."""
    known = {name: seen for name, (_, seen) in before.items()}
    nothing: dict[int, str] = {}
    for name, (origin, seen) in after.items():
        of_origin = known.get(origin, nothing)
        for storage, writer in seen.items():
            expected = of_origin.get(storage, writer)
            if writer != expected:
                raise GraphError(
                    f"{name} now reads memory as {writer or 'the step found it'}"
                    f"{' left it' if writer else ''}, and not as {expected or 'the step found it'}"
                    f"{' left it' if expected else ''}"
                )
    return after


def _writers_seen(step: StepGraph) -> Contents:
    """Each node's name to its origin, and to the last write to each storage that it reads, "" where there is none."""
    wrote: dict[int, str] = {}
    found = {}
    copies = _Copies(step, wrote)
    for node in step.nodes:
        origin = node.meta.get("origin", node.name)
        if is_cache(node):
            copies.moved(node)
            continue
        if host_nodes.is_update(node):
            found.update(copies.updated(node))
            continue
        waited = is_wait(node)
        given, looked_at, changed = effects(node)
        if waited or not is_view(node):
            looked_at = touched(begun(node)) if waited else looked_at | given
            seen = {storage: wrote.get(storage, "") for storage in looked_at}
            for storage, writer in seen.items():
                _check_there(node, storage, writer)
            found[node.name] = (origin, seen)
        for storage in changed:
            copies.check_read(node, storage)
            # Collectives that are made one bring their results at any of their waits.
            wrote[storage] = "a collective" if waited else origin
    copies.check_end()
    return found


_AWAY, _COMING = "no memory", "a copy that was not waited for"


class _Copies:
    """Follows what cache operators make of the contents of storages: `wrote`, the last writer of each."""

    def __init__(self, step: StepGraph, wrote: dict[int, str]) -> None:
        self._slots, self._wrote = step.slots, wrote
        self._held: dict[int, str] = {}
        """Slot to the last writer of what was stored there."""
        self._coming: dict[int, str] = {}
        """Storage to the last writer of what it is being filled with."""
        self._gone: dict[int, str] = {}
        """Storage to the last writer of what was given up."""
        self._stored: set[int] = set()
        """Slots whose store was not waited for."""
        self._reading: dict[int, set[int]] = {}
        """Storage to the slots that it is being copied to."""
        for number, slot in step.slots.items():
            if slot.rest != "step":
                if step.storages[slot.storage].name is None:
                    raise GraphError(f"slot {number} does not hold storage {slot.storage} as a step begins")
                self._held[number] = ""
                self._stored.add(number)  # in the step before, as far as this one knows
            if slot.rest == "away":
                wrote[slot.storage] = _AWAY
        # A copy that a step begins last is waited for in the next one.
        last = {slot_of(node): node for node in (step.nodes if step.slots else ()) if is_cache(node)}
        for number, node in last.items():
            if node.target is prefetch and step.slots[number].rest == "here":
                wrote[step.slots[number].storage], self._coming[step.slots[number].storage] = _COMING, ""
            if node.target is store and step.slots[number].rest == "here":
                self._reading.setdefault(step.slots[number].storage, set()).add(number)

    def moved(self, node: fx.Node) -> None:
        """A cache operator."""
        number, (storage,) = slot_of(node), touched(node)
        slot, now = self._slots[number], self._wrote.get(storage, "")
        if (slot.storage, slot.tier) != (storage, node.args[2]):
            raise GraphError(f"{node} moves storage {storage}, and slot {number} is storage {slot.storage}'s")
        if node.target is prefetch:
            if now != _AWAY or number not in self._held:
                raise GraphError(f"{node}: storage {storage} has memory, or slot {number} holds nothing yet")
            self._coming[storage] = self._held[number]
            self._wrote[storage] = _COMING
        elif node.target is store:
            _check_there(node, storage, now)
            self._held[number] = now
            self._stored.add(number)
            self._reading.setdefault(storage, set()).add(number)
        elif node.target is detach:
            _check_there(node, storage, now)
            if number in self._stored or self._held.get(number) != now:
                raise GraphError(
                    f"{node} gives up what slot {number} does not hold: store it, and wait for it"
                )
            self.check_read(node, storage)
            self._gone[storage] = now
            self._wrote[storage] = _AWAY
        else:
            self._stored.discard(number)
            self._reading.get(storage, set()).discard(number)
            if now == _COMING:
                self._wrote[storage] = self._coming.pop(storage)

    def updated(self, node: fx.Node) -> dict[str, tuple[str, dict[int, str]]]:
        """An update: each of its calls as if it were a node. Without slots it is still to be given some."""
        storages, slots = host_nodes.storages_of(node), host_nodes.slots_of(node)
        # Taken along when it begins, so that they need to be there no longer than that.
        given = [next(values_of(source)).storage for source in host_nodes.host_arguments_of(node)]
        for storage in given:
            _check_there(node, storage, self._wrote.get(storage, ""))
        if slots:
            for storage, number in zip(storages, slots, strict=True):
                self._check_slot(node, storage, number)
        now = {
            storage: self._held[slots[at]] if slots else self._wrote.get(storage, "")
            for at, storage in enumerate(storages)
        }
        found = {}
        for call in host_nodes.calls_of(node):
            seen = {given[at]: self._wrote.get(given[at], "") for at in call.given}
            seen.update((storages[at], now[storages[at]]) for at in call.moved)
            found[call.name] = (call.name, seen)
            now.update((storages[at], call.name) for at in call.writes)
        for at, (storage, writer) in enumerate(now.items()):
            if slots:
                self._held[slots[at]] = self._gone[storage] = writer
            else:
                self._wrote[storage] = writer
        return found

    def check_read(self, node: fx.Node, storage: int) -> None:
        """Raise GraphError where a node changes or gives up what is still being copied."""
        for number in sorted(self._reading.get(storage, ())):
            raise GraphError(
                f"{node} ({node.target}) changes storage {storage} or gives it up while it is being copied to slot "
                f"{number}: wait for that first"
            )

    def _check_slot(self, node: fx.Node, storage: int, number: int) -> None:
        slot = self._slots[number]
        if (slot.storage, slot.tier) != (storage, host_nodes.tier_of(node)):
            raise GraphError(
                f"{node} updates storage {storage}, and slot {number} is storage {slot.storage}'s"
            )
        now = self._wrote.get(storage, "")
        if now != _AWAY or self._held.get(number) != self._gone.get(storage, ""):
            raise GraphError(
                f"{node} ({node.target}) works in slot {number}, which is not where storage {storage} is: store it "
                "there, and give its memory up"
            )

    def check_end(self) -> None:
        """Raise GraphError unless the next step finds things as this one did."""
        for number, slot in self._slots.items():
            now = self._wrote.get(slot.storage, "")
            if slot.rest == "away" and (
                now != _AWAY or self._held[number] != self._gone.get(slot.storage, "")
            ):
                raise GraphError(f"at the end storage {slot.storage} does not rest in slot {number} alone")
            now = self._coming.get(slot.storage, now) if now == _COMING and slot.rest == "here" else now
            if slot.rest == "here" and (now in (_AWAY, _COMING) or self._held.get(number) != now):
                raise GraphError(f"at the end slot {number} does not hold what storage {slot.storage} does")
        here = {slot.storage for slot in self._slots.values() if slot.rest == "here"}
        for storage, now in self._wrote.items():
            if now == _COMING and storage not in here:
                raise GraphError(f"nothing waits for what storage {storage} is being filled with")


def _check_there(node: fx.Node, storage: int, now: str) -> None:
    if now in (_AWAY, _COMING):
        raise GraphError(f"{node} ({node.target}) needs storage {storage}, which holds {now}")
