"""The Timeline of a pipeline's step: each device group is a rank class, each task of a stage an op.

    gather (once)  ·  tasks in the order of the schedule  ·  reduce (once)  ·  norm over all groups  ·  update (once)

A task takes the seconds that its stage was priced at, collectives of its own mesh included; transfers between groups
are spans of their own. A task's op allocates and frees what it changes in memory:

    F       saved, and while it runs what it needs beyond that       I      less `released` at its end
    W, B    frees the rest                                           the first W or B: the gradients of its stage

A pair of tasks is one op, which changes what both change, and needs what both need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyper_parallel.estimate.stage_price import StagePrice
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program import TaskKind
from hyper_parallel.report.html import PAIRED
from hyper_parallel.schedule import Action, Costs, Schedule, Timing, time_schedule
from hyper_parallel.trace import Bytes, Collective, Kind, Op, Span, Trace

AXIS = "pipeline"
_PHASES = {
    TaskKind.FORWARD: "forward",
    TaskKind.BACKWARD: "backward",
    TaskKind.INPUT: "input gradients",
    TaskKind.WEIGHT: "weight gradients",
}


@dataclass(frozen=True)
class Ends:
    """Seconds of one device group's work once a step, and of what all groups do together."""

    gather: float = 0.0
    reduce: float = 0.0
    update: float = 0.0


@dataclass(frozen=True)
class PipelineStep:
    """A step of a pipeline with its times."""

    trace: Trace
    spans: tuple[Span, ...]
    timing: Timing
    """Of the schedule's actions; the step has `Ends` around them."""


def pipeline_step(
    schedule: Schedule,
    groups: Sequence[DeviceGroup],
    prices: Sequence[StagePrice],
    costs: Costs,
    ends: Sequence[Ends],
    buffers: Sequence[int],
    *,
    norm: float = 0.0,
) -> PipelineStep:
    """The step of a schedule.

    `groups`, `ends` and `buffers` (bytes of receive buffers) by rank of the schedule; `prices` and `costs` by stage.
    `norm`: seconds of the sum over all groups that the update waits for. Raises StrategyError where the schedule is of
    other sizes, DeadlockError where it cannot run.
    """
    timing = time_schedule(schedule, costs, [one.gather for one in ends])
    transfers = _transfers(schedule, costs, timing)
    reduced = [
        max((*timing.ends[rank], ends[rank].gather)) + ends[rank].reduce for rank in range(schedule.ranks)
    ]
    barrier = max(reduced, default=0.0)
    classes = {rank: group.name for group in groups for rank in group.ranks}
    writers = []
    for rank, group in enumerate(groups):
        writer = _Writer(rank, groups, schedule, prices, buffers[rank])
        writer.gather(ends[rank].gather)
        at = 0
        for unit in schedule.units(rank):
            writer.task(unit, timing.starts[rank][at], timing.ends[rank][at], transfers)
            at += len(unit)
        for (kind, stage, micro_batch), (source, target, start, end) in transfers.items():
            if source == rank:
                writer.send(Action(kind, stage, micro_batch), target, start, end)
        writer.finish(reduced[rank] - ends[rank].reduce, reduced[rank], barrier, norm, ends[rank].update)
        writers.append((group.name, writer))
    trace = Trace(
        {name: tuple(one.ops) for name, one in writers},
        classes,
        {name: tuple(one.resident) for name, one in writers},
        micro_batches=schedule.micro_batches,
    )
    return PipelineStep(trace, tuple(span for _, one in writers for span in one.spans), timing)


_Key = tuple[TaskKind, int, int]
_Transfer = tuple[int, int, float, float]
"""Source rank, target rank, start, end."""


def _transfers(schedule: Schedule, costs: Costs, timing: Timing) -> dict[_Key, _Transfer]:
    """The transfer that each action waits for; over one border in one direction they follow one another."""
    found: dict[_Key, _Transfer] = {}
    placement = schedule.placement
    for rank, order in enumerate(schedule.orders):
        free: dict[tuple[bool, int], float] = {}
        for action, end in zip(order, timing.ends[rank], strict=True):
            forward = action.kind is TaskKind.FORWARD
            if action.kind is TaskKind.WEIGHT:
                continue
            target = action.stage + (1 if forward else -1)
            if not 0 <= target < schedule.stages or placement[target] == rank:
                continue
            border = min(action.stage, target)
            start = max(end, free.get((forward, border), 0.0))
            free[forward, border] = start + costs.transfers[border]
            moved = (rank, placement[target], start, start + costs.transfers[border])
            for kind in (TaskKind.FORWARD,) if forward else (TaskKind.BACKWARD, TaskKind.INPUT):
                found[kind, target, action.micro_batch] = moved
    actions = {(a.kind, a.stage, a.micro_batch) for order in schedule.orders for a in order}
    return {key: moved for key, moved in found.items() if key in actions}


@dataclass
class _Writer:
    """The ops of one device group as they grow."""

    rank: int
    groups: Sequence[DeviceGroup]
    schedule: Schedule
    prices: Sequence[StagePrice]
    buffers: int
    ops: list[Op] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    resident: list[Bytes] = field(default_factory=list)
    _number: int = 0
    _held: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Stage and micro-batch to the storages that its passes have left."""
    _gradients: dict[int, int] = field(default_factory=dict)
    """Stage to the storage of its gradients, once it has any."""
    _free: float = 0.0
    """When the last op on the compute queue ended."""
    _received: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage, place in enumerate(self.schedule.placement):
            if place == self.rank:
                price = self.prices[stage]
                self._resident("parameter", price.resident.parameter, f"parameters of stage {stage}")
                self._resident("parameter", price.gathered, f"gathered weights of stage {stage}")
                self._resident("optimizer", price.resident.optimizer, f"optimizer state of stage {stage}")
        self._resident("temporary", self.buffers, "receive buffers")

    def gather(self, seconds: float) -> None:
        """What comes before the first micro-batch."""
        if seconds:
            self._add("gather weights", "gather", 0.0, seconds, collective=self._own("all_gather"))

    def task(
        self, unit: Sequence[Action], start: float, end: float, transfers: Mapping[_Key, _Transfer]
    ) -> None:
        """A task or a pair of tasks, and the receives that it waits for."""
        after = [op.index for op in self.ops[:1] if op.phase == "gather"]
        allocates: list[Bytes] = []
        frees: list[int] = []
        for action in unit:
            transfer = transfers.get((action.kind, action.stage, action.micro_batch))
            if transfer is not None:
                after.append(self._receive(action, transfer))
            more, fewer = self._memory(action)
            allocates += more
            frees += fewer
        self._add(
            PAIRED.join(map(str, unit)),
            PAIRED.join(_PHASES[action.kind] for action in unit),
            start,
            end,
            module=", ".join(f"stage {action.stage}" for action in unit),
            after=tuple(after),
            allocates=tuple(allocates),
            frees=tuple(frees),
        )
        self._free = end

    def _receive(self, action: Action, transfer: _Transfer) -> int:
        source, _, begun, arrived = transfer
        ready = min(begun, max(self._free, self._received.get(source, 0.0)))
        self._received[source] = arrived
        ends = (self.groups[source].ranks[0], self.groups[self.rank].ranks[0])
        return self._add(
            f"receive for {action}",
            _PHASES[action.kind],
            begun,
            arrived,
            collective=Collective("recv", ends, 0, AXIS, str(action)),
            queue=f"comm:from {self.groups[source].name}",
            ready=ready,
        )

    def send(self, action: Action, target: int, start: float, end: float) -> None:
        """A transfer to the group whose action waits for it."""
        pair = (self.groups[self.rank].ranks[0], self.groups[target].ranks[0])
        self._add(
            f"send for {action}",
            _PHASES[action.kind],
            start,
            end,
            collective=Collective("send", pair, 0, AXIS, str(action)),
            queue=f"comm:to {self.groups[target].name}",
        )

    def finish(self, begin: float, reduced: float, barrier: float, norm: float, update: float) -> None:
        """Reductions, the norm over all groups, and the update."""
        last = max((op.index for op in self.ops if op.queue == "compute"), default=None)
        after = () if last is None else (last,)
        if reduced > begin:
            after = (
                self._add(
                    "reduce gradients",
                    "reduce",
                    begin,
                    reduced,
                    collective=self._own("reduce_scatter"),
                    queue="comm:gradients",
                    after=after,
                ),
            )
        everyone = tuple(rank for group in self.groups for rank in group.ranks)
        met = self._add(
            "gradient norm",
            "clip",
            barrier,
            barrier + norm,
            collective=Collective("all_reduce", everyone, 0, AXIS),
            queue="comm:all groups",
            after=after,
            ready=reduced,
        )
        self._add(
            "update",
            "optimizer",
            barrier + norm,
            barrier + norm + update,
            after=(met,),
            frees=tuple(self._gradients.values()),
        )

    def _own(self, kind: str) -> Collective:
        return Collective(kind, tuple(self.groups[self.rank].ranks), 0, "stage")

    def _memory(self, action: Action) -> tuple[list[Bytes], list[int]]:
        """What a task allocates and frees."""
        price = self.prices[action.stage]
        memory, place = price.memory, (action.stage, action.micro_batch)
        allocates: list[Bytes] = []
        frees: list[int] = []
        forward, before, weights = memory.peaks
        if action.kind is TaskKind.FORWARD:
            # What the INPUT half frees, and what stays for the WEIGHT half.
            early = max(0, memory.saved - memory.left)
            parts = [self._new("activation", early), self._new("activation", memory.saved - early)]
            self._held[place] = [one.storage for one in parts]
            allocates, base, peak = parts, memory.saved, forward
        elif action.kind is TaskKind.INPUT:
            early, rest = self._held.pop(place)
            frees = [early]
            more = self._new("activation", max(0, memory.left - memory.saved))
            self._held[place] = [rest, more.storage]
            allocates, base, peak = [more], memory.saved + more.bytes, before
        else:
            frees = self._held.pop(place)
            base = memory.left if action.kind is TaskKind.WEIGHT else memory.saved
            peak = weights if action.kind is TaskKind.WEIGHT else max(before, weights)
            if action.stage not in self._gradients:
                made = self._new("gradient", price.resident.gradient, f"gradients of stage {action.stage}")
                allocates = [made]
                self._gradients[action.stage] = made.storage
        if peak > base:
            needed = self._new("temporary", peak - base)
            allocates.append(needed)
            frees.append(needed.storage)
        return allocates, frees

    def _new(self, kind: Kind, count: int, name: str = "") -> Bytes:
        self._number += 1
        return Bytes(self._number, count, kind, name=name)

    def _resident(self, kind: Kind, count: int, name: str) -> None:
        if count:
            self.resident.append(self._new(kind, count, name))

    def _add(
        self,
        name: str,
        phase: str,
        start: float,
        end: float,
        *,
        module: str = "",
        queue: str | None = None,
        collective: Collective | None = None,
        after: tuple[int, ...] = (),
        allocates: tuple[Bytes, ...] = (),
        frees: tuple[int, ...] = (),
        ready: float | None = None,
    ) -> int:
        index = len(self.ops)
        queue = queue or ("compute" if collective is None else f"comm:{collective.axis}")
        op = Op(
            index,
            name,
            module,
            phase,
            queue,
            collective=collective,
            after=after,
            allocates=allocates,
            frees=frees,
        )
        self.ops.append(op)
        first = min(self.groups[self.rank].ranks)
        self.spans.append(Span(first, op.engine, start, end, op, start if ready is None else ready))
        return index
