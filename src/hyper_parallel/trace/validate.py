"""Validation of a Trace: structure, storages, and matching collective calls.

- An op waits only for ops before it, so that there is no cycle.
- A storage is allocated once, and freed at most once, after that.
- All classes of a collective's ranks make the call: for each tag and group equally often, with matching kinds. The
  n-th call of one class matches the n-th of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hyper_parallel.errors import TraceError
from hyper_parallel.trace.op import Collective, Op, copy_tiers, is_comm, is_compute

if TYPE_CHECKING:
    from hyper_parallel.trace.trace import Trace

Meeting = tuple[str, tuple[str, ...], int]
"""Identifies matching calls of different classes: tag, classes in order, and the index of the call."""


def meetings(trace: Trace) -> dict[str, dict[int, Meeting]]:
    """The ops of each class with collectives that involve other classes: index to Meeting.

    Raises TraceError if a group has ranks outside the trace, or if a call has no counterpart.
    """
    groups = _Groups(trace)
    found: dict[str, dict[int, Meeting]] = {}
    for name, ops in trace.ops.items():
        counts: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
        found[name] = {}
        for op in ops:
            if op.collective is None:
                continue
            classes = groups.classes(op.collective, name, op)
            if len(classes) > 1:
                key = (op.collective.tag, classes)
                found[name][op.index] = (*key, counts[key])
                counts[key] += 1
    _all_meet(trace, found)
    return found


def check(trace: Trace) -> None:
    """Raise TraceError for the first violation."""
    for rank, name in trace.classes.items():
        if name not in trace.ops:
            raise TraceError(
                f"rank {rank} is of class {name!r}, which has no ops in the trace; it has {_listed(trace.ops)}"
            )
    for name in trace.ops.keys() | trace.resident.keys():
        if name not in trace.classes.values():
            raise TraceError(
                f"no rank is of class {name!r}; leave the class out, or add its ranks to `classes`"
            )
        if name not in trace.ops:
            raise TraceError(f"class {name!r} has resident storages and no ops")
    for name, ops in trace.ops.items():
        for place, op in enumerate(ops):
            _check_op(name, place, op)
        _check_storages(trace, name)
    meetings(trace)


def _check_op(name: str, place: int, op: Op) -> None:
    if op.index != place:
        raise TraceError(f"{_told(name, op)} stands at place {place}; an op's index is its place in the list")
    for other in op.after:
        if not 0 <= other < place:
            raise TraceError(
                f"{_told(name, op)} waits for op {other}, which is not before it; order the ops so that each "
                "waits only for earlier ones"
            )
    if op.work is not None and op.collective is not None:
        raise TraceError(f"{_told(name, op)} has both work and a collective; make two ops of it")
    tiers = copy_tiers(op.queue)
    if not (is_compute(op.queue) or is_comm(op.queue) or tiers or op.queue == "host"):
        raise TraceError(
            f"{_told(name, op)} is on queue {op.queue!r}; a queue is compute, compute:<name>, comm:<axis>, "
            "copy:<from>><to> or host"
        )
    if op.collective is not None and not is_comm(op.queue):
        raise TraceError(
            f"{_told(name, op)} is a collective on queue {op.queue!r}; it needs a comm:<axis> queue"
        )
    if op.collective is None and is_comm(op.queue):
        raise TraceError(
            f"{_told(name, op)} is on queue {op.queue!r} and has no collective; only they run there"
        )


def _check_storages(trace: Trace, name: str) -> None:
    alive = {held.storage for held in trace.resident.get(name, ())}
    if len(alive) != len(trace.resident.get(name, ())):
        raise TraceError(f"class {name!r} lists a resident storage twice; each storage has its own number")
    known = set(alive)
    for op in trace.ops[name]:
        for held in op.allocates:
            if held.storage in known:
                raise TraceError(
                    f"{_told(name, op)} allocates storage {held.storage}, which was there before; each allocation "
                    "needs a new number"
                )
            known.add(held.storage)
            alive.add(held.storage)
        for storage in op.frees:
            if storage not in alive:
                when = "already freed" if storage in known else "never allocated"
                raise TraceError(f"{_told(name, op)} frees storage {storage}, which was {when}")
            alive.remove(storage)


class _Groups:
    """The classes of each group of ranks. Groups are looked up by identity first: a trace repeats few of them."""

    def __init__(self, trace: Trace) -> None:
        self._of = trace.classes
        self._known: dict[int, tuple[str, ...]] = {}

    def classes(self, call: Collective, name: str, op: Op) -> tuple[str, ...]:
        found = self._known.get(id(call.ranks))
        if found is None:
            missing = [rank for rank in call.ranks if rank not in self._of]
            if missing:
                raise TraceError(
                    f"{_told(name, op)} calls ranks {missing}; the trace has {len(self._of)} ranks, "
                    f"{min(self._of)} to {max(self._of)}"
                )
            found = tuple(sorted({self._of[rank] for rank in call.ranks}))
            self._known[id(call.ranks)] = found
        if name not in found:
            raise TraceError(
                f"{_told(name, op)} is a call of ranks {call.ranks}, and none of them is of its class"
            )
        return found


def _all_meet(trace: Trace, found: dict[str, dict[int, Meeting]]) -> None:
    """Check that every class makes each matched call, and that the kinds match."""
    calls: dict[Meeting, dict[str, Op]] = defaultdict(dict)
    for name, of in found.items():
        for index, meeting in of.items():
            calls[meeting][name] = trace.ops[name][index]
    for (tag, classes, turn), given in calls.items():
        told = f"call {turn + 1} tagged {tag!r} of the classes {_listed(classes)}"
        absent = [name for name in classes if name not in given]
        if absent:
            name, op = next(iter(given.items()))
            raise TraceError(
                f"{told} is made by {_told(name, op)} and not by {_listed(absent)}; all classes of a group make "
                "the same calls, or give what differs another tag"
            )
        kinds = sorted({op.collective.kind for op in given.values() if op.collective})
        if len(kinds) > 1 and kinds != ["recv", "send"]:
            raise TraceError(f"{told} is of different kinds: {_listed(kinds)}")
        if kinds in (["send"], ["recv"]):
            raise TraceError(f"{told} is a {kinds[0]} on every side; one sends and the other receives")


def _told(name: str, op: Op) -> str:
    return f"op {op.index} ({op.name}) of class {name!r}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
