"""Page of an answer with allocations: verdict, steps drawn by part and rank, bubbles by cause, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from hyper_parallel.planner.answer import Page
from hyper_parallel.planner.submodels.search import Allocations, MicroBatchTimes, Step
from hyper_parallel.planner.submodels.sizes import WORD, Sizes, Task, allocation, memory_of_parts
from hyper_parallel.program import TaskKind
from hyper_parallel.report.html import (
    CAUSES,
    WORK,
    Lane,
    Stretch,
    part_chart,
    shares,
)
from hyper_parallel.report.sheets import Fact, Sheet
from hyper_parallel.schedule import Action, MicroBatchKind, time_step
from hyper_parallel.schedule.micro_batch_kinds import StepTables
from hyper_parallel.schedule.timing import Timing
from hyper_parallel.units import format_bytes, format_duration

_SHOWN = 16
"""Rows of a chart."""


def page_of(
    found: Allocations, title: str, verdict: str, notes: Sequence[str], sheets: Sequence[Sheet]
) -> Page:
    """The page of an answer: the chosen allocation first, and the other one beside it."""
    task, chosen = found.task, found.chosen.sizes
    assert chosen is not None, "an answer has an allocation that fits"
    both = []
    for name, one in found.named:
        if one.sizes is not None:
            lanes_of = disjoint_lanes if one.sizes.encoders else colocated_lanes
            both.append((name, one, one.sizes, lanes_of(task, one.sizes, one.steps[0])))
    both.sort(key=lambda drawing: drawing[1] is not found.chosen)
    longest = max(one.steps[0].seconds for _, one, _, _ in both)
    charts = []
    for name, one, sizes, lanes in both:
        what = "chosen" if one is found.chosen else "in its place"
        shown = lanes if sizes.encoders else lanes[:_SHOWN]
        more = f", the first {_SHOWN} of {len(lanes)} data ranks" if len(lanes) > len(shown) else ""
        heading = f"{what}, {name}: {escape(allocation(task, sizes))}{more}; the first step"
        charts.append(part_chart(heading, shown, one.steps[0].seconds, longest, WORD))
    fullest = format_bytes(max(memory_of_parts(task, chosen).values()))
    bubbles = _bubbles(task.devices, {name: (lanes, one.steps[0].seconds) for name, one, _, lanes in both})
    return Page(
        word=WORD,
        title=title,
        verdict=verdict,
        heading=title,
        facts=[
            Fact("step", format_duration(found.chosen.seconds), f"{WORD}, mean of {len(task.steps)} steps"),
            Fact("idle", f"{found.chosen.bubbles:.1%}", "of all devices' time"),
            Fact("fullest device", fullest, f"estimated, of {format_bytes(task.capacity)} usable"),
            Fact("devices", str(chosen.devices), f"of {task.devices}: {allocation(task, chosen)}"),
        ],
        body="".join(charts),
        sheets=[bubbles, *sheets],
        notes=f"<h2>About these figures</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>",
        styles=("page.css", "submodels.css"),
    )


def _bubbles(devices: int, steps: Mapping[str, tuple[list[Lane], float]]) -> Sheet:
    """Shares of all devices' time in the first step, of lanes and seconds by name."""
    found = [shares(lanes, devices, seconds) for lanes, seconds in steps.values()]
    kinds = [*WORK, *CAUSES, "unused"]
    rows = tuple(
        (kind, *(f"{one[kind]:.1%}" for one in found)) for kind in kinds if any(one[kind] for one in found)
    )
    note = (
        "of all devices' time in the first step. encoder, forward, backward: computation; once: reductions, update and "
        "gathers once a step; imbalance: another part still computes what the next task needs; data: as that, for "
        "micro-batches or data ranks with more work than the mean; communication: values on their way, and collectives "
        "that nothing hides; fill, drain: before a group's first task and after its last one"
    )
    return Sheet("time, and bubbles by cause", ("", *steps), rows, left=1, note=note)


_HEAVY = 1.02
"""Times the mean of a part's tasks: a task that takes longer is long for its data."""
_WORDS = {
    TaskKind.FORWARD: "forward pass",
    TaskKind.INPUT: "gradients of inputs",
    TaskKind.WEIGHT: "gradients of weights",
    TaskKind.BACKWARD: "backward pass",
}


def disjoint_lanes(task: Task, sizes: Sizes, step: Step) -> list[Lane]:
    """A row for each encoder and each stage of the language model."""
    assert step.schedule is not None, "a disjoint step has a schedule"
    timing = time_step(step.kinds, step.schedule)
    walk = _Waits(StepTables(step.kinds, step.schedule.ranks), timing, step.schedule.orders)
    names = [each.name for each in task.costs.encoders]
    several = sizes.pipeline > 1
    names += [f"language {stage}" if several else "language" for stage in range(sizes.pipeline)]
    devices = [*sizes.encoders, *[sizes.data * sizes.tensor] * sizes.pipeline]
    lanes = []
    for rank, (name, count) in enumerate(zip(names, devices, strict=True)):
        found = list(walk.lane(rank, "encoder" if rank < len(sizes.encoders) else ""))
        once = Stretch("once", timing.makespan, step.seconds)
        lanes.append(Lane(f"{name} × {count}" if count > 1 else name, count, [*found, once]))
    return lanes


@dataclass
class _Waits:
    """Tasks of a timed step, and what each waited for."""

    tables: StepTables
    timing: Timing
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        self._ends: dict[tuple[bool, int, int], tuple[float, bool]] = {}
        """(forward, stage of its kind, micro-batch) to when it ended, and whether it took longer than the mean."""
        for rank, order in enumerate(self.orders):
            durations = [b - a for a, b in zip(self.timing.starts[rank], self.timing.ends[rank], strict=True)]
            of_kind: dict[TaskKind, list[float]] = {}
            for action, seconds in zip(order, durations, strict=True):
                of_kind.setdefault(action.kind, []).append(seconds)
            for at, action in enumerate(order):
                if action.kind is TaskKind.WEIGHT:
                    continue
                kind, stage = self._own(action)
                end = self.timing.ends[rank][at]
                if action.kind is TaskKind.BACKWARD:
                    end -= kind.costs.weight[stage]
                alike = of_kind[action.kind]
                heavy = durations[at] > _HEAVY * sum(alike) / len(alike)
                self._ends[action.kind is TaskKind.FORWARD, stage, action.micro_batch] = end, heavy

    def _own(self, action: Action) -> tuple[MicroBatchKind, int]:
        number = self.tables.kind_of[action.micro_batch]
        return self.tables.kinds[number], action.stage - self.tables.first_stage[number]

    def lane(self, rank: int, work: str) -> Iterator[Stretch]:
        """A rank's tasks and bubbles up to the end of the last rank's. `work`: what its tasks are drawn as."""
        cursor = 0.0
        times = zip(self.orders[rank], self.timing.starts[rank], self.timing.ends[rank], strict=True)
        for action, start, end in times:
            if start > cursor:
                yield from self._bubbles(action, cursor, start)
            forward = action.kind is TaskKind.FORWARD
            title = f"{_WORDS[action.kind]} of micro-batch {action.micro_batch}"
            yield Stretch(work or ("forward" if forward else "backward"), start, end, title)
            cursor = end
        if self.timing.makespan > cursor:
            yield Stretch("drain" if cursor else "imbalance", cursor, self.timing.makespan)

    def _bubbles(self, action: Action, cursor: float, start: float) -> Iterator[Stretch]:
        """Why a task did not begin at once."""
        if not cursor:
            yield Stretch("fill", cursor, start)
            return
        kind, stage = self._own(action)
        forward = action.kind is TaskKind.FORWARD
        edges = kind.forward if forward else kind.backward
        awaited = [
            (ended + seconds, ended, heavy)
            for (source, target), seconds in edges.items()
            if target == stage
            for ended, heavy in [self._ends[forward, source, action.micro_batch]]
        ]
        _, ended, heavy = max(awaited, default=(start, start, False))
        sent = min(max(cursor, ended), start)
        if sent > cursor:
            yield Stretch("data" if heavy else "imbalance", cursor, sent)
        if start > sent:
            yield Stretch("communication", sent, start)


def colocated_lanes(task: Task, sizes: Sizes, step: Step) -> list[Lane]:
    """A row for each data rank of one mesh."""
    lanes = []
    for rank, part in enumerate(step.ranks):
        found: list[Stretch] = []
        cursor = 0.0
        for number, one in enumerate(part):
            for stretch in _micro_batch(one, number, cursor):
                found.append(stretch)
                cursor = stretch.end
        name = (
            f"rank {rank}"
            if sizes.tensor == 1
            else f"ranks {rank * sizes.tensor}–{(rank + 1) * sizes.tensor - 1}"
        )
        lanes.append(Lane(name, sizes.tensor, [*found, Stretch("once", cursor, step.seconds)]))
    return lanes


def _micro_batch(one: MicroBatchTimes, number: int, start: float) -> Iterator[Stretch]:
    parts = (
        ("encoder", one.encoders, f"encoders, both passes of micro-batch {number}"),
        ("forward", one.language_forward, f"language model, forward pass of micro-batch {number}"),
        (
            "backward",
            one.language - one.language_forward,
            f"language model, backward pass of micro-batch {number}",
        ),
        ("communication", one.exposed, ""),
        ("data", one.waits, "waits for the data rank with most work"),
    )
    for kind, seconds, title in parts:
        if seconds > 0:
            yield Stretch(kind, start, start + seconds, title)
            start += seconds
