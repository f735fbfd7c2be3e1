"""Trace: the ops of every rank in one step, with their dependencies."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hyper_parallel.errors import TraceError
from hyper_parallel.workload.work import Work

Kind = Literal["parameter", "gradient", "optimizer", "activation", "temporary", "input"]
"""Kinds of storages."""

KINDS: tuple[Kind, ...] = ("parameter", "gradient", "optimizer", "activation", "temporary", "input")

PAIRED = " with "
"""Between the names of two tasks that run as one op."""

_INDEX = re.compile(r"(^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Bytes:
    """A storage: bytes in one tier, alive from the op that allocates it to the op that frees it."""

    storage: int
    """Its number, unique in its rank class. A copy in another tier is another storage."""
    bytes: int
    kind: Kind
    tier: str = "device"
    """The name of a tier of the cluster."""
    name: str = ""
    """Its name if no op allocates it, such as a parameter's."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A call that several ranks make together; it runs once all of them have reached it.

    `send` and `recv` are the two halves of one call, of the ranks (from, to).
    """

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `recv`, `barrier`, …"""
    ranks: tuple[int, ...]
    """The global ranks of the group."""
    bytes: int
    """Bytes that a rank gives (for `recv`: that it receives)."""
    axis: str = ""
    """The mesh axis of the group."""
    tag: str = ""
    """Matches the calls of different rank classes: the n-th call of a tag and group in each class."""

    @property
    def paired(self) -> bool:
        """Whether it is point-to-point, as between the stages of a pipeline."""
        return self.kind in ("send", "recv")


@dataclass(frozen=True, slots=True)
class Op:
    """A piece of work of one rank. It has `work`, or a `collective`, or neither (it takes no time)."""

    index: int
    """Its place in its rank class's list."""
    name: str
    module: str = ""
    """The name of the module that ran it, such as `model.layers.3.mlp`."""
    phase: str = ""
    """`forward`, `loss`, `backward`, `clip` or `optimizer`."""
    queue: str = "compute"
    """Its queue, which runs in order: `compute`, another compute queue (`compute:vector`), `comm:<axis>`,
    `copy:<from>><to>` with the names of two tiers, or `host`.
    """
    work: Work | None = None
    """The work of a kernel; for a copy between tiers, `read` is the bytes that it moves."""
    collective: Collective | None = None
    after: tuple[int, ...] = ()
    """Indices of the ops that it waits for, all below its own."""
    allocates: tuple[Bytes, ...] = ()
    """Storages that it allocates: alive from its start."""
    frees: tuple[int, ...] = ()
    """Numbers of the storages that it frees: alive until its end."""
    recomputed: bool = False
    """Whether it recomputes a part of the forward pass."""

    @property
    def engine(self) -> str:
        """The engine that it occupies: `matrix` or `vector` for a kernel, else its queue."""
        if not is_compute(self.queue):
            return self.queue
        return "matrix" if self.work and self.work.kind in ("matmul", "attention") else "vector"

    @property
    def part(self) -> str:
        """The phase, or `recompute`."""
        return "recompute" if self.recomputed else self.phase

    @property
    def sort(self) -> str:
        """The kind of work: a `Work`'s or a `Collective`'s kind, or `none`."""
        return self.work.kind if self.work else self.collective.kind if self.collective else "none"


def is_compute(queue: str) -> bool:
    """Whether kernels run on a queue of that name."""
    return queue == "compute" or queue.startswith("compute:")


def is_comm(queue: str) -> bool:
    """Whether collectives run on a queue of that name."""
    return queue.startswith("comm:")


def copy_tiers(queue: str) -> tuple[str, str] | None:
    """The tiers (from, to) of a copy queue's name, None where it is none.

    >>> copy_tiers("copy:device>host")
    ('device', 'host')
    """
    source, arrow, target = queue.removeprefix("copy:").partition(">")
    return (source, target) if queue.startswith("copy:") and arrow and source and target else None


def pattern(module: str) -> str:
    """A module's name with `*` for every index, so that equal layers have the same name.

    >>> pattern("model.layers.3.mlp.experts.7")
    'model.layers.*.mlp.experts.*'
    """
    return _INDEX.sub(r"\1*", module)


@dataclass(frozen=True)
class Trace:
    """The ops of each rank class. Ranks that run the same ops share a class, and are simulated once.

    `Trace.check` validates it; `simulate` calls `check`.
    """

    ops: Mapping[str, tuple[Op, ...]]
    """Class to its ops. The ops of one queue run in this order."""
    classes: Mapping[int, str]
    """Rank to class, for all ranks."""
    resident: Mapping[str, tuple[Bytes, ...]] = field(default_factory=dict)
    """Class to the storages that are alive when the step begins."""
    model_flops: float = 0.0
    """Model FLOPs of the step, all ranks together, by the convention of `workload.work`; 0 where not known."""
    micro_batches: int = 1
    """Micro-batches per step."""

    def first(self, name: str) -> int:
        """The lowest rank of a class, which represents the others."""
        return self._firsts[name]

    def size(self, name: str) -> int:
        """The number of ranks in a class."""
        return self._sizes[name]

    def check(self) -> None:
        """Raise TraceError if the trace cannot run: structure, storages, collectives that do not match."""
        check(self)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.classes)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that hold anything, `device` first."""
        names = {held.tier for of in self.resident.values() for held in of}
        names |= {held.tier for ops in self.ops.values() for op in ops for held in op.allocates}
        return tuple(sorted(names, key=lambda name: (name != "device", name)))

    def __post_init__(self) -> None:
        firsts: dict[str, int] = {}
        for rank in sorted(self.classes):
            firsts.setdefault(self.classes[rank], rank)
        object.__setattr__(self, "_firsts", firsts)
        object.__setattr__(self, "_sizes", Counter(self.classes.values()))

    _firsts: Mapping[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _sizes: Mapping[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """When an op ran, and where. Times are seconds since the step began."""

    rank: int
    """The lowest rank of its class."""
    engine: str
    """`matrix`, `vector`, or the name of the queue."""
    start: float
    end: float
    op: Op
    ready: float
    """When its predecessors in its queue and its dependencies on its own rank had ended. From then until `start` a
    collective waits for other ranks, and a kernel for its engine.
    """


# Validation of a Trace: structure, storages, and matching collective calls.
#
# - An op waits only for ops before it, so that there is no cycle.
# - A storage is allocated once, and freed at most once, after that.
# - All classes of a collective's ranks make the call: for each tag and group equally often, with matching kinds. The
#   n-th call of one class matches the n-th of the others.

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
        raise TraceError(
            f"{_described(name, op)} stands at place {place}; an op's index is its place in the list"
        )
    for other in op.after:
        if not 0 <= other < place:
            raise TraceError(
                f"{_described(name, op)} waits for op {other}, which is not before it; order the ops so that each "
                "waits only for earlier ones"
            )
    if op.work is not None and op.collective is not None:
        raise TraceError(f"{_described(name, op)} has both work and a collective; make two ops of it")
    tiers = copy_tiers(op.queue)
    if not (is_compute(op.queue) or is_comm(op.queue) or tiers or op.queue == "host"):
        raise TraceError(
            f"{_described(name, op)} is on queue {op.queue!r}; a queue is compute, compute:<name>, comm:<axis>, "
            "copy:<from>><to> or host"
        )
    if op.collective is not None and not is_comm(op.queue):
        raise TraceError(
            f"{_described(name, op)} is a collective on queue {op.queue!r}; it needs a comm:<axis> queue"
        )
    if op.collective is None and is_comm(op.queue):
        raise TraceError(
            f"{_described(name, op)} is on queue {op.queue!r} and has no collective; only they run there"
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
                    f"{_described(name, op)} allocates storage {held.storage}, which was there before; each allocation "
                    "needs a new number"
                )
            known.add(held.storage)
            alive.add(held.storage)
        for storage in op.frees:
            if storage not in alive:
                when = "already freed" if storage in known else "never allocated"
                raise TraceError(f"{_described(name, op)} frees storage {storage}, which was {when}")
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
                    f"{_described(name, op)} calls ranks {missing}; the trace has {len(self._of)} ranks, "
                    f"{min(self._of)} to {max(self._of)}"
                )
            found = tuple(sorted({self._of[rank] for rank in call.ranks}))
            self._known[id(call.ranks)] = found
        if name not in found:
            raise TraceError(
                f"{_described(name, op)} is a call of ranks {call.ranks}, and none of them is of its class"
            )
        return found


def _all_meet(trace: Trace, found: dict[str, dict[int, Meeting]]) -> None:
    """Check that every class makes each matched call, and that the kinds match."""
    calls: dict[Meeting, dict[str, Op]] = defaultdict(dict)
    for name, of in found.items():
        for index, meeting in of.items():
            calls[meeting][name] = trace.ops[name][index]
    for (tag, classes, turn), given in calls.items():
        place = f"call {turn + 1} tagged {tag!r} of the classes {_listed(classes)}"
        absent = [name for name in classes if name not in given]
        if absent:
            name, op = next(iter(given.items()))
            raise TraceError(
                f"{place} is made by {_described(name, op)} and not by {_listed(absent)}; all classes of a group make "
                "the same calls, or give what differs another tag"
            )
        kinds = sorted({op.collective.kind for op in given.values() if op.collective})
        if len(kinds) > 1 and kinds != ["recv", "send"]:
            raise TraceError(f"{place} is of different kinds: {_listed(kinds)}")
        if kinds in (["send"], ["recv"]):
            raise TraceError(f"{place} is a {kinds[0]} on every side; one sends and the other receives")


def _described(name: str, op: Op) -> str:
    return f"op {op.index} ({op.name}) of class {name!r}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
