"""Page of an answer with allocations: verdict, steps drawn by part and rank, bubbles by cause, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from hyper_parallel.planner.answer import Page
from hyper_parallel.planner.submodels.expansion import groups_of
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
from hyper_parallel.schedule import Action, MicroBatchKind
from hyper_parallel.schedule.micro_batch_kinds import StepTables
from hyper_parallel.trace import Span
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
_LETTERS = {TaskKind.FORWARD: "F", TaskKind.INPUT: "I", TaskKind.WEIGHT: "W", TaskKind.BACKWARD: "IW"}
"""Of the names of tasks in a step's Trace."""
_ONCE = ("reduce", "clip", "optimizer")
"""Phases of what a rank does behind its micro-batches."""


def disjoint_lanes(task: Task, sizes: Sizes, step: Step) -> list[Lane]:
    """A row for each encoder and each stage of the language model."""
    assert step.schedule is not None, "a step of parts on devices of their own"
    assert step.timeline is not None, "it was simulated"
    groups = groups_of(task, sizes)
    walk = _Waits(
        StepTables(step.kinds, step.schedule.ranks),
        step.schedule.orders,
        [step.timeline.of(group.name) for group in groups],
        step.seconds,
    )
    names = [each.name for each in task.costs.encoders]
    several = sizes.pipeline > 1
    names += [f"language {stage}" if several else "language" for stage in range(sizes.pipeline)]
    lanes = []
    for rank, (name, group) in enumerate(zip(names, groups, strict=True)):
        count = group.mesh.world
        found = list(walk.lane(rank, "encoder" if rank < len(sizes.encoders) else ""))
        lanes.append(Lane(f"{name} × {count}" if count > 1 else name, count, found))
    return lanes


@dataclass
class _Waits:
    """Tasks of a simulated step, and what each waited for."""

    tables: StepTables
    orders: tuple[tuple[Action, ...], ...]
    spans: Sequence[tuple[Span, ...]]
    """By rank of the schedule."""
    seconds: float
    """Of the step."""

    def __post_init__(self) -> None:
        self._ran = [{span.op.name: span for span in spans} for spans in self.spans]
        self._ends: dict[tuple[bool, int, int], tuple[float, bool]] = {}
        """(forward, stage of its kind, micro-batch) to when it ended, and whether it took longer than the mean."""
        for rank, order in enumerate(self.orders):
            durations = [sum(span.end - span.start for span in self._spans(rank, action)) for action in order]
            of_kind: dict[TaskKind, list[float]] = {}
            for action, seconds in zip(order, durations, strict=True):
                of_kind.setdefault(action.kind, []).append(seconds)
            for action, seconds in zip(order, durations, strict=True):
                if action.kind is TaskKind.WEIGHT:
                    continue
                _, stage = self._own(action)
                alike = of_kind[action.kind]
                heavy = seconds > _HEAVY * sum(alike) / len(alike)
                end = self._spans(rank, action)[0].end
                self._ends[action.kind is TaskKind.FORWARD, stage, action.micro_batch] = end, heavy

    def _own(self, action: Action) -> tuple[MicroBatchKind, int]:
        number = self.tables.kind_of[action.micro_batch]
        return self.tables.kinds[number], action.stage - self.tables.first_stage[number]

    def _spans(self, rank: int, action: Action) -> list[Span]:
        """A backward pass is two tasks."""
        letters = _LETTERS[action.kind]
        return [self._ran[rank][f"{letter}{action.stage}.{action.micro_batch}"] for letter in letters]

    def lane(self, rank: int, work: str) -> Iterator[Stretch]:
        """A rank's tasks and bubbles. `work`: what its tasks are drawn as."""
        cursor = max((span.end for span in self.spans[rank] if span.op.phase == "gather"), default=0.0)
        if cursor:
            yield Stretch("once", 0.0, cursor)
        for at, action in enumerate(self.orders[rank]):
            forward = action.kind is TaskKind.FORWARD
            title = f"{_WORDS[action.kind]} of micro-batch {action.micro_batch}"
            for part, span in enumerate(self._spans(rank, action)):
                if span.start > cursor and part:
                    yield Stretch("communication", cursor, span.start)
                elif span.start > cursor:
                    yield from self._bubbles(action, cursor, span.start, first=not at)
                yield Stretch(work or ("forward" if forward else "backward"), span.start, span.end, title)
                cursor = span.end
        wait = "drain" if self.orders[rank] else "imbalance"
        for span in self.spans[rank]:
            if span.op.phase in _ONCE and span.end > cursor:
                if span.start > cursor:
                    yield Stretch(wait, cursor, span.start)
                yield Stretch("once", max(cursor, span.start), span.end)
                cursor = span.end
        if self.seconds > cursor:
            yield Stretch(wait, cursor, self.seconds)

    def _bubbles(self, action: Action, cursor: float, start: float, *, first: bool) -> Iterator[Stretch]:
        """Why a task did not begin at once. `first`: it is the first one of its rank."""
        if first:
            yield Stretch("fill", cursor, start)
            return
        kind, stage = self._own(action)
        forward = action.kind is TaskKind.FORWARD
        edges = kind.forward if forward else kind.backward
        awaited = [
            self._ends[forward, source, action.micro_batch] for source, target in edges if target == stage
        ]
        ended, heavy = max(awaited, default=(start, False))
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
