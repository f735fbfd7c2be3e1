"""Memory timeline: live bytes of a tier by kind, and the peak.

    alive(t) = resident + Σ bytes of storages allocated by ops with start ≤ t < end of the op that frees them

A storage is alive from the start of the op that allocates it to the end of the op that frees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.trace.live_bytes import LiveBytes
from hyper_parallel.trace.trace import KINDS, Bytes, Kind, Op

if TYPE_CHECKING:
    from hyper_parallel.trace.trace import Span, Trace


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes alive in a tier of one rank: a step function. A time may occur several times."""

    times: Sequence[float]
    """Seconds, ascending, from 0."""
    by_kind: dict[Kind, Sequence[int]]
    """Bytes from each time to the next, by kind; kinds without bytes are left out."""

    @property
    def total(self) -> list[int]:
        """Bytes of all kinds from each time to the next."""
        return [sum(values) for values in zip(*self.by_kind.values(), strict=True)] or [0] * len(self.times)


@dataclass(frozen=True)
class Alive:
    """A live storage, and the op that allocated it."""

    held: Bytes
    op: Op | None
    """The op that allocated it; None if it was alive when the step began."""
    since: float
    """Seconds."""

    @property
    def name(self) -> str:
        """Its name, else the name of the op that allocated it."""
        return self.held.name or (self.op.name if self.op else f"storage {self.held.storage}")


@dataclass(frozen=True)
class Peak:
    """The moment of peak memory in a tier of a rank."""

    rank: int
    tier: str
    time: float
    """Seconds."""
    alive: tuple[Alive, ...]
    """The live storages, largest first."""

    @property
    def bytes(self) -> int:
        """Total live bytes."""
        return sum(alive.held.bytes for alive in self.alive)

    @property
    def by_kind(self) -> dict[Kind, int]:
        """Bytes by kind, in the order of KINDS."""
        return _sums((alive.held.kind, alive.held.bytes) for alive in self.alive)


def curve(trace: Trace, name: str, spans: Iterable[Span], tier: str) -> MemoryCurve:
    """Bytes that the ranks of a class hold in a tier over time."""
    now = dict.fromkeys(KINDS, 0)
    for held in trace.resident.get(name, ()):
        if held.tier == tier:
            now[held.kind] += held.bytes
    times, rows = [0.0], [tuple(now.values())]
    for time, held, sign, _ in _changes(trace, name, spans):
        if held.tier == tier and held.bytes:
            now[held.kind] += sign * held.bytes
            times.append(time)
            rows.append(tuple(now.values()))
    columns = zip(KINDS, zip(*rows, strict=True), strict=True)
    return MemoryCurve(times, {kind: column for kind, column in columns if any(column)})


def peak(trace: Trace, name: str, spans: Iterable[Span], tier: str) -> Peak:
    """The first moment of peak memory of a class's ranks in a tier."""
    resident = [held for held in trace.resident.get(name, ()) if held.tier == tier]
    ordered = [change for change in _changes(trace, name, spans) if change[1].tier == tier]
    live = LiveBytes(sum(held.bytes for held in resident))
    grown = [place for place, (_, held, sign, _) in enumerate(ordered, 1) if live.add(sign * held.bytes)]
    at = grown[-1] if grown else 0
    alive = {held.storage: Alive(held, None, 0.0) for held in resident}
    for time, held, sign, op in ordered[:at]:
        if sign > 0:
            alive[held.storage] = Alive(held, op, time)
        else:
            del alive[held.storage]
    time = ordered[at - 1][0] if at else 0.0
    largest = sorted(alive.values(), key=lambda one: (-one.held.bytes, one.held.storage))
    return Peak(trace.first(name), tier, time, tuple(largest))


def _changes(trace: Trace, name: str, spans: Iterable[Span]) -> Iterator[tuple[float, Bytes, int, Op]]:
    """(time, storage, +1 or −1, op), sorted by time, then by op, so that an op that takes no time allocates before it
    frees.
    """
    known = {held.storage: held for held in trace.resident.get(name, ())}
    found = []
    for span in spans:
        op = span.op
        for held in op.allocates:
            known[held.storage] = held
            found.append((span.start, op.index, 0, held, op))
        found.extend((span.end, op.index, 1, known[storage], op) for storage in op.frees)
    found.sort(key=lambda change: change[:3])
    for time, _, freed, held, op in found:
        yield time, held, -1 if freed else 1, op


def _sums(pairs: Iterable[tuple[Kind, int]]) -> dict[Kind, int]:
    sums = dict.fromkeys(KINDS, 0)
    for kind, count in pairs:
        sums[kind] += count
    return {kind: count for kind, count in sums.items() if count}
