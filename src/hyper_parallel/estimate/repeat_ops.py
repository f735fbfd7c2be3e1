"""Repeats the ops of a captured block, to extend a trace from few layers or micro-batches to all.

A step of many layers, or of many micro-batches, is captured with a few of them, in blocks that are alike:

    … F M L …        forward, or one micro-batch after the other
    … L M F …        backward

M is the block that is repeated. The ops that belong to a block form runs, one in the forward pass, one in the backward
pass and so on, and the runs of F, M and L that stand beside each other have the same ops. From that follows what each
copy of M refers to:

- its own storages and ops, each copy having its own;
- what M refers to in F is for every copy but the first what it is in the copy before it; for L the same way round;
- what F and L refer to in M is in the first and in the last copy; what lies outside and frees something of M frees that
  of all copies.

Whatever does not follow this pattern is refused with `Unlike`, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.trace import Bytes, Op, pattern

Tag = int | None
"""The block that an op belongs to; None outside of all."""


class Unlike(Exception):
    """The blocks are not alike, so that none can be repeated."""


@dataclass(frozen=True)
class Loop:
    """A block and how often it runs."""

    middle: int
    """The block that is repeated. Those before and behind it are its likes."""
    times: int
    """How often it runs in all."""

    @property
    def likes(self) -> tuple[int, int]:
        """The blocks beside it."""
        return self.middle - 1, self.middle + 1


@dataclass(frozen=True)
class Repeated:
    """The longer list."""

    ops: tuple[Op, ...]
    resident: tuple[Bytes, ...]
    origin: tuple[int, ...]
    """Of each op, its index in the shorter list."""


Rename = Callable[[str, Tag, int], str]
"""(name, block, copy of the middle block) to the name; the copy is 0 but for the middle block."""


def repeat(
    ops: Sequence[Op],
    tags: Sequence[Tag],
    resident: Sequence[tuple[Bytes, Tag]],
    loop: Loop,
    rename: Rename = lambda name, tag, copy: name,
) -> Repeated:
    """The ops with the middle block run `loop.times` times. Raises Unlike where the pattern does not hold."""
    return _Repeater(ops, tags, resident, loop, rename).result()


@dataclass(frozen=True)
class _Run:
    """Neighbouring ops of one block."""

    tag: Tag
    start: int
    stop: int


class _Repeater:
    def __init__(
        self,
        ops: Sequence[Op],
        tags: Sequence[Tag],
        resident: Sequence[tuple[Bytes, Tag]],
        loop: Loop,
        rename: Rename,
    ) -> None:
        self._ops, self._loop, self._rename = ops, loop, rename
        self._resident = resident
        self._tags = tags
        self._runs = _runs(self._tags)
        self._run_of = [at for at, run in enumerate(self._runs) for _ in range(run.start, run.stop)]
        self._beside: dict[int, int] = {}
        """Run of F or L to that of M beside it."""
        self._backwards: set[int] = set()
        """Runs of M that stand between L and F."""
        for at, run in enumerate(self._runs):
            if run.tag == loop.middle:
                self._match(at)
        if not self._beside:
            raise Unlike(f"no op belongs to block {loop.middle}")
        self._made = {held.storage: (op.index, slot) for op in ops for slot, held in enumerate(op.allocates)}
        self._next = 1 + max((held.storage for held, _ in resident), default=-1)
        self._next = max(self._next, 1 + max(self._made, default=-1))
        self._copies: dict[tuple[int, int], int] = {}

    def _match(self, at: int) -> None:
        first, last = self._loop.likes
        before = self._runs[at - 1] if at else None
        behind = self._runs[at + 1] if at + 1 < len(self._runs) else None
        found = (before.tag if before else None, behind.tag if behind else None)
        if found not in ((first, last), (last, first)):
            raise Unlike(f"{_told(self._ops[self._runs[at].start])} stands between blocks {found}")
        for other in (at - 1, at + 1):
            self._compare(at, other)
            self._beside[other] = at
        if found == (last, first):
            self._backwards.add(at)

    def _compare(self, at: int, other: int) -> None:
        here, there = self._runs[at], self._runs[other]
        if here.stop - here.start != there.stop - there.start:
            raise Unlike(f"blocks of {here.stop - here.start} and of {there.stop - there.start} ops")
        for a, b in zip(self._ops[here.start : here.stop], self._ops[there.start : there.stop], strict=True):
            if _signature(a) != _signature(b):
                raise Unlike(f"{_told(a)} is not like {_told(b)}")

    # Storages

    def _copy(self, storage: int, copy: int) -> int:
        """The number of a copy's storage; the first copy keeps what M has."""
        if copy == 0:
            return storage
        key = (storage, copy)
        if key not in self._copies:
            self._copies[key] = self._next
            self._next += 1
        return self._copies[key]

    def _owner(self, storage: int) -> Tag:
        return self._tags[self._made[storage][0]] if storage in self._made else None

    def _in_middle(self, storage: int) -> int:
        """What M has where F or L has this storage."""
        op, slot = self._made[storage]
        run = self._run_of[op]
        if run not in self._beside:
            raise Unlike(f"{_told(self._ops[op])} makes what a copy would free, and has no like")
        middle = self._runs[self._beside[run]].start + op - self._runs[run].start
        return self._ops[middle].allocates[slot].storage

    def _freed(self, op: Op, copy: int) -> list[int]:
        """What an op frees."""
        first, last = self._loop.likes
        middle, end = self._loop.middle, self._loop.times - 1
        tag = self._tags[op.index]
        found = []
        for storage in op.frees:
            owner = self._owner(storage)
            if tag == middle:
                if owner == middle:
                    found.append(self._copy(storage, copy))
                elif owner == first:
                    found.append(storage if copy == 0 else self._copy(self._in_middle(storage), copy - 1))
                elif owner == last:
                    found.append(storage if copy == end else self._copy(self._in_middle(storage), copy + 1))
                else:
                    raise Unlike(f"{_told(op)} frees what was made outside of the blocks")
            elif owner != middle:
                found.append(storage)
            elif tag == first:
                found.append(self._copy(storage, 0))
            elif tag == last:
                found.append(self._copy(storage, end))
            else:
                found += [self._copy(storage, of) for of in range(self._loop.times)]
        return found

    # Ops

    def result(self) -> Repeated:
        places: dict[tuple[int, int], int] = {}
        """(op, copy) to its new index."""
        order: list[tuple[int, int]] = []
        for at, run in enumerate(self._runs):
            copies = [0]
            if run.tag == self._loop.middle:
                copies = list(range(self._loop.times))
                if at in self._backwards:
                    copies.reverse()
            for copy in copies:
                for index in range(run.start, run.stop):
                    places[index, copy] = len(order)
                    order.append((index, copy))
        made = [self._op(index, copy, new, places) for new, (index, copy) in enumerate(order)]
        return Repeated(tuple(made), self._residents(), tuple(index for index, _ in order))

    def _op(self, index: int, copy: int, new: int, places: dict[tuple[int, int], int]) -> Op:
        op, tag = self._ops[index], self._tags[index]
        after: set[int] = set()
        for other in op.after:
            after.update(self._awaited(index, copy, other, places))
        allocates = tuple(
            Bytes(
                self._copy(held.storage, copy),
                held.bytes,
                held.kind,
                held.tier,
                self._rename(held.name, tag, copy) if held.name else "",
            )
            for held in op.allocates
        )
        # Written out: `replace` takes several times as long, and this is done for each op of a step.
        return Op(
            new,
            op.name,
            self._rename(op.module, tag, copy) if op.module else "",
            op.phase,
            op.queue,
            op.work,
            op.collective,
            tuple(sorted(after)) if len(after) > 1 else tuple(after),
            allocates,
            tuple(self._freed(op, copy)) if op.frees else (),
            op.recomputed,
        )

    def _awaited(self, index: int, copy: int, other: int, places: dict[tuple[int, int], int]) -> list[int]:
        """The new indices of what an op waits for."""
        middle, end = self._loop.middle, self._loop.times - 1
        here, there = self._run_of[index], self._run_of[other]
        if self._tags[index] == middle:
            # Which copy runs first depends on the direction.
            backwards = here in self._backwards
            begins = copy == (end if backwards else 0)
            if there == here:
                return [places[other, copy]]
            if there == here - 1 and not begins:
                like = self._runs[here].start + other - self._runs[there].start
                return [places[like, copy + (1 if backwards else -1)]]
            if self._tags[other] == middle:
                return [places[other, copy]]
            return [places[other, 0]]
        if self._tags[other] != middle:
            return [places[other, 0]]
        if there == here - 1:
            return [places[other, 0 if there in self._backwards else end]]
        return [places[other, of] for of in range(self._loop.times)]

    def _residents(self) -> tuple[Bytes, ...]:
        found = []
        for held, tag in self._resident:
            copies = range(self._loop.times) if tag == self._loop.middle else (0,)
            for copy in copies:
                number = self._copy(held.storage, copy)
                found.append(replace(held, storage=number, name=self._rename(held.name, tag, copy)))
        return tuple(found)


def _runs(tags: Sequence[Tag]) -> list[_Run]:
    found: list[_Run] = []
    start = 0
    for at in range(1, len(tags) + 1):
        if at == len(tags) or tags[at] != tags[start]:
            found.append(_Run(tags[start], start, at))
            start = at
    return found


def _signature(op: Op) -> tuple[object, ...]:
    """What ops of blocks that are alike have in common."""
    held = tuple((one.bytes, one.kind, one.tier) for one in op.allocates)
    module = pattern(op.module)
    return op.name, module, op.phase, op.queue, op.work, op.collective, held, len(op.frees), op.recomputed


def _told(op: Op) -> str:
    return f"op {op.index} ({op.name}, {op.module or 'no module'}, {op.phase})"
