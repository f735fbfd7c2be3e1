"""Slot table of a tier: offsets, what each slot holds, copies under way, and moves of slots within the tier."""

from __future__ import annotations

import bisect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from hyper_parallel.compat import Backend, Event
from hyper_parallel.errors import FaultError, TierError


class Copy:
    """One copy: a `Pending`, and what other copies need to know of it.

    Two things must happen until it is over. Its work is given to where it runs or, where that is a thread, done
    (`issued`); and what the work launched on a device's stream is reached (`event`).
    """

    def __init__(
        self,
        what: str,
        first: int,
        x: torch.Tensor,
        limit: float,
        backend: Backend,
        span: int | None = None,
    ) -> None:
        """`x`: what is copied. `span`: bytes of the tier that must not change meanwhile; left out, as many as `x`
        has."""
        self.what = what
        """In words, for messages."""
        self.first, self.bytes = first, x.numel() if span is None else span
        """Where in the tier."""
        self.sums: list[int] = []
        """Checksums of its parts, of a write where the tier keeps some."""
        self._x: torch.Tensor | None = x  # its memory must not be used again before the copy is over
        self._limit = limit
        self.by_host = False
        """A thread of the host does it, or has to wait for one that does."""
        self._ready, self._began, self._over = (
            backend.Event(),
            backend.Event(timing=True),
            backend.Event(timing=True),
        )
        self._timed = False
        self._took: float | None = None
        self._ready.record()
        self._issued = threading.Event()
        self._failure: BaseException | None = None

    @property
    def ready(self) -> Event:
        """Reached when what the caller had launched before is done."""
        return self._ready

    def attempt(self, work: Callable[[], object]) -> None:
        """Do `work`, which is all of the copy, on the stream that is current."""
        try:
            work()
            self._over.record()
        except BaseException as error:
            self.finish(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C, where work is done in the calling thread
        self.finish()

    def begin(self) -> None:
        """Say that all it waited for is over, on the stream that is current: its link is its own from now on."""
        self._timed = True
        self._began.record()

    def took(self, seconds: float) -> None:
        """Say for how long it had its link, where no stream knows."""
        self._took = seconds

    def finish(self, failure: BaseException | None = None) -> None:
        """Say that the work is given, or why it cannot be. The first word counts."""
        if not self._issued.is_set():
            self._failure = failure
            self._issued.set()

    def wait(self) -> float:
        held = self.hold()
        self._x = None
        return held

    def hold(self) -> float:
        """Let the current stream find the copy over, as one copy does that comes after another."""
        held = self._given()
        if self._failure is not None:
            raise self._error() from self._failure
        self._over.wait()
        return held

    def block(self) -> None:
        """Block the thread until it is over. Raises TierError if it failed."""
        self._given()
        if self._failure is not None:
            raise self._error() from self._failure
        self._over.synchronize()

    def done(self) -> bool:
        over = self._issued.is_set() and (self._failure is not None or self._over.query())
        if over:
            self._x = None
        return over

    @property
    def seconds(self) -> float | None:
        if not self.done() or self._failure is not None:
            return None
        if self._took is None and self._timed:
            self._took = 1e-3 * self._began.elapsed_time(self._over)
        return self._took

    def settle(self) -> None:
        """Block the thread until it is over, well or badly. Raises TierError at the time limit."""
        self._given()
        if self._failure is None:
            self._over.synchronize()
        self._x = None

    def _error(self) -> TierError:
        """A full disk is the user's to mend; what else fails in the middle of a copy is not."""
        mendable = isinstance(self._failure, TierError) and not isinstance(self._failure, FaultError)
        return (TierError if mendable else FaultError)(f"{self.what} failed: {self._failure}")

    def _given(self) -> float:
        started = time.perf_counter()
        if not self._issued.wait(self._limit):
            raise FaultError(
                f"{self.what} has not ended within {self._limit:g} s: the memory or the disk behind it does not "
                "answer; see the system's log"
            )
        return time.perf_counter() - started

    def meets(self, first: int, count: int) -> bool:
        """Whether it is about one of these bytes."""
        return self.first < first + count and first < self.first + self.bytes


class UnderWay:
    """The copies of a tier that may not be over yet."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []

    def add(self, copy: Copy) -> list[Copy]:
        """Note a copy; those that must be over before it may begin."""
        self._copies = [other for other in self._copies if not other.done()]
        before = [other for other in self._copies if other.meets(copy.first, copy.bytes)]
        self._copies.append(copy)
        return before

    def settle(self) -> None:
        """Block until all are over, well or badly."""
        for copy in self._copies:
            copy.settle()
        self._copies.clear()


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """The bytes `first` … `last` − 1 of a tier."""

    first: int
    last: int

    @property
    def bytes(self) -> int:
        return self.last - self.first

    def meets(self, other: SlotPlacement) -> bool:
        """Whether they have a byte in common."""
        return self.first < other.last and other.first < self.last


@dataclass
class Slots:
    """The slots of one tier."""

    name: str
    """The tier's, for messages."""
    places: dict[int, SlotPlacement] = field(default_factory=dict)
    written: dict[int, Copy] = field(default_factory=dict)
    """Slot to the copy that put there what is in it."""
    _sharing: dict[int, list[int]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Bytes of the tier up to the end of the last slot."""
        return max((place.last for place in self.places.values()), default=0)

    def replaced(self, places: dict[int, SlotPlacement]) -> Slots:
        """The same tier with other slots: those that stay hold what they held.

        Raises TierError if two of them would lie in the same bytes, or one has become too small for what is in it.
        """
        kept = {slot: copy for slot, copy in self.written.items() if slot in places}
        found = Slots(self.name, places, kept, sharing(places))
        for slot, copy in kept.items():
            if copy.bytes > places[slot].bytes:
                raise TierError(
                    f"slot {slot} of the {self.name} tier holds {copy.bytes} bytes and was to have "
                    f"{places[slot].bytes} from now on; a slot that stays must keep its size"
                )
            for other in found._sharing[slot]:
                if other in kept:
                    raise TierError(
                        f"slots {slot} and {other} of the {self.name} tier both hold something and were to share "
                        "memory from now on; give slots that live together offsets that do not overlap"
                    )
        return found

    def for_write(self, slot: int, x: torch.Tensor) -> SlotPlacement:
        """Where the bytes of `x` go. What shares memory with the slot is gone from now on."""
        place = self._place(slot, x)
        if x.numel() > place.bytes:
            raise TierError(
                f"{x.numel()} bytes were to be written to slot {slot} of the {self.name} tier, which has room for "
                f"{place.bytes}; reserve more for it"
            )
        for other in (slot, *self._sharing[slot]):
            self.written.pop(other, None)
        return SlotPlacement(place.first, place.first + x.numel())

    def for_read(self, slot: int, x: torch.Tensor) -> tuple[SlotPlacement, Copy]:
        """Where the bytes for `x` come from, and the copy that put them there."""
        place = self._place(slot, x)
        source = self._source(slot, "read")
        if source.bytes != x.numel():
            raise TierError(
                f"slot {slot} of the {self.name} tier holds {source.bytes} bytes, and {x.numel()} were to be read"
            )
        return SlotPlacement(place.first, place.first + x.numel()), source

    def for_work(self, slot: int) -> tuple[SlotPlacement, Copy]:
        """Where the bytes are that were last written to a slot, and what put them there."""
        source = self._source(slot, "computed on by the host")
        first = self.places[slot].first
        return SlotPlacement(first, first + source.bytes), source

    def _source(self, slot: int, wanted: str) -> Copy:
        source = self.written.get(slot)
        if source is None:
            raise TierError(
                f"slot {slot} of the {self.name} tier was to be {wanted}, and nothing is in it: it was never written, "
                "or a slot that shares its memory was written after it"
            )
        return source

    def _place(self, slot: int, x: torch.Tensor) -> SlotPlacement:
        assert (x.dtype, x.dim(), x.is_contiguous()) == (torch.uint8, 1, True), "x is the bytes of a storage"
        if slot not in self.places:
            raise TierError(
                f"the {self.name} tier has no slot {slot}; reserve it first ({len(self.places)} are reserved)"
            )
        return self.places[slot]


def lay(
    name: str, sizes: Mapping[int, int], offsets: Mapping[int, int] | None, align: int
) -> dict[int, SlotPlacement]:
    """Slot to its place: where `offsets` say, or one after the other, each at a multiple of `align`."""
    if offsets is None:
        at, places = 0, {}
        for slot, count in sizes.items():
            places[slot] = SlotPlacement(at, at + count)
            at += -(-count // align) * align
        return places
    for slot in sizes:
        if slot not in offsets:
            raise TierError(f"slot {slot} of the {name} tier was given no offset, and others were")
        if offsets[slot] < 0 or offsets[slot] % align:
            raise TierError(
                f"slot {slot} of the {name} tier was given the offset {offsets[slot]}; it must be a multiple of {align}"
            )
    return {slot: SlotPlacement(offsets[slot], offsets[slot] + count) for slot, count in sizes.items()}


def sharing(places: Mapping[int, SlotPlacement]) -> dict[int, list[int]]:
    """Slot to the others that share a byte with it."""
    found: dict[int, list[int]] = {slot: [] for slot in places}
    open_: list[int] = []
    for slot in sorted(places, key=lambda slot: places[slot].first):
        open_ = [other for other in open_ if places[other].last > places[slot].first]
        for other in open_:
            if places[slot].meets(places[other]):
                found[slot].append(other)
                found[other].append(slot)
        open_.append(slot)
    return found


# Order of moves when slots of a memory swap places within it.
#
# Piece i may be copied once every piece whose bytes it would write over has been. What waits in a circle is broken by
# copying one piece, the smallest, aside first.


@dataclass(frozen=True, slots=True)
class Shift:
    """`bytes` from one place to another; neither the sources nor the targets of several overlap."""

    source: int
    target: int
    bytes: int


Step = tuple[Literal["copy", "aside", "back"], Shift]
"""`copy`: to its target, with which its source may overlap. `aside`: out of the way, and `back`: from there."""


def ordered(shifts: Sequence[Shift]) -> list[Step]:
    """Steps after which every piece is at its target."""
    moving = sorted(
        (one for one in shifts if one.source != one.target and one.bytes), key=lambda one: one.source
    )
    ends = [one.source + one.bytes for one in moving]
    blocks: dict[int, list[int]] = defaultdict(list)
    blockers = [0] * len(moving)
    for index, one in enumerate(moving):
        at = bisect.bisect_right(ends, one.target)
        while at < len(moving) and moving[at].source < one.target + one.bytes:
            if at != index:
                blocks[at].append(index)
                blockers[index] += 1
            at += 1
    steps: list[Step] = []
    backs: list[Step] = []
    free = [index for index, count in enumerate(blockers) if not count]
    left = set(range(len(moving)))

    def gone(index: int) -> None:
        left.discard(index)
        for blocked in blocks[index]:
            blockers[blocked] -= 1
            if not blockers[blocked] and blocked in left:
                free.append(blocked)

    while left:
        if free:
            index = free.pop()
            steps.append(("copy", moving[index]))
        else:
            index = min(left, key=lambda one: (moving[one].bytes, one))
            steps.append(("aside", moving[index]))
            backs.append(("back", moving[index]))
        gone(index)
    return steps + backs
