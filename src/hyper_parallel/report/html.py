"""HTML building blocks of the pages: templates, cards, tables, embedded data, and Gantt charts as SVG."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from hyper_parallel.report.sheets import Sheet
from hyper_parallel.trace import Span, Timeline, is_compute
from hyper_parallel.trace.trace import PAIRED
from hyper_parallel.units import format_duration


def asset(name: str) -> str:
    """A file of `assets/`."""
    return (files("hyper_parallel.report") / "assets" / name).read_text(encoding="utf-8")


def filled(template: str, slots: Mapping[str, str]) -> str:
    """A template of `assets/` with its ${slots} filled in."""
    return Template(asset(template)).substitute(slots)


def embedded(data: Any) -> str:
    """JSON for a script element, with `<` escaped, since only that could end the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def badge(word: str) -> str:
    """A badge that states the kind of the numbers: `predicted`, `measured`, `estimated`."""
    return f'<b class="badge {word}">{word}</b>'


def card(name: str, body: str) -> str:
    """A figure with its name; `body` is HTML."""
    return f'<div class="card"><h3>{escape(name)}</h3>{body}</div>'


def sheet_table(sheet: Sheet, badge: str) -> str:
    """A table, headed by a badge (HTML)."""

    def attributes(at: int) -> str:
        # A narrow screen leaves out what a narrow terminal does.
        names = ["number"] * (at >= sheet.left) + ["minor"] * (sheet.columns[at] in sheet.drop)
        return f' class="{" ".join(names)}"' if names else ""

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{attributes(at)}>{escape(cell)}</{tag}>" for at, cell in enumerate(cells))

    body = "".join(
        f"<tr{' class=sum' if cells[0] in ('sum', 'step') else ''}>{row(cells, 'td')}</tr>"
        for cells in sheet.rows
    )
    note = f"<p>{escape(sheet.note)}</p>" if sheet.note else ""
    return (
        f'<section class="table"><h3>{badge} {escape(sheet.title)}</h3><div class="scroll"><table>'
        f"<thead><tr>{row(sheet.columns, 'th')}</tr></thead><tbody>{body}</tbody></table></div>{note}</section>"
    )


# Gantt chart of a pipeline: a row for each device group, its tasks with their micro-batches, its bubbles by cause.
#
# An idle stretch of a group is coloured by its cause: `fill` before the first task, `transfer` while the value that the
# next task waits for is on its way, `waiting` while the neighbour still computes it, `drain` after the last task. Tasks
# that run as a pair are drawn one above the other.

_TASK = re.compile(r"([FBIW])(\d+)\.(\d+)$")
_WORDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_CAUSES = ("fill", "waiting", "transfer", "drain")

ROW, LEFT, TOP = 30, 74, 20
"""Height of a row, and where rows begin, in pixels."""
_LEAST, _MOST = 900.0, 9000.0
"""Width of the drawing, in pixels."""
_BLOCK = 20.0
"""Width of a task of mean length, in pixels, so that its number can be read."""


@dataclass(frozen=True)
class IdleStretch:
    """Seconds in which a group computes nothing, for one cause."""

    cause: str
    start: float
    end: float


def idle_stretches(timeline: Timeline, name: str) -> list[IdleStretch]:
    """The idle stretches of a rank class of a pipeline, in order."""
    spans = timeline.of(name)
    by_index = {span.op.index: span for span in spans}
    begin = schedule_begin(timeline, name)
    last = max((span.start for span in spans if span.op.name == "update"), default=timeline.step)
    found: list[IdleStretch] = []
    cursor, awaited = begin, list[Span]()
    for span in spans:
        if is_compute(span.op.queue) and span.op.work is None:
            awaited += [by_index[index] for index in span.op.after if by_index[index].op.collective]
        if not _tasks(span):
            continue
        moved = min((one.start for one in awaited if one.end > cursor), default=span.start)
        parts = [("fill" if cursor == begin else "waiting", cursor, min(moved, span.start))]
        parts.append(("transfer", max(cursor, moved), span.start))
        found += [IdleStretch(cause, start, end) for cause, start, end in parts if end > start]
        cursor, awaited = span.end, []
    if last > cursor:
        found.append(IdleStretch("drain", cursor, last))
    return found


def task_spans(timeline: Timeline, name: str) -> list[Span]:
    """The tasks of a rank class of a pipeline, in order."""
    return [span for span in timeline.of(name) if _tasks(span)]


def schedule_begin(timeline: Timeline, name: str) -> float:
    """When a rank class may run its first task: at the end of its gathers."""
    return max((span.end for span in timeline.of(name) if span.op.phase == "gather"), default=0.0)


def gantt(timeline: Timeline) -> str:
    """The chart as HTML, with an SVG drawing that needs no script."""
    names = list(timeline.trace.ops)
    tasks = [span for span in timeline.spans if _tasks(span) and span.end > span.start]
    mean = sum(span.end - span.start for span in tasks) / len(tasks) if tasks else timeline.step
    width = min(_MOST, max(_LEAST, _BLOCK * timeline.step / mean)) if mean else _LEAST
    scale = (width - LEFT - 10) / timeline.step if timeline.step else 0.0
    height = TOP + ROW * len(names) + 8
    rows = "".join("".join(_row(timeline, name, at, scale)) for at, name in enumerate(names))
    drawn = {task[1] for span in tasks for task in _tasks(span)}
    legend = "".join(
        f'<span><i class="{kind}"></i>{word}</span>'
        for kind, word in (
            *((f"task-{letter.lower()}", word) for letter, word in _WORDS.items() if letter in drawn),
            ("other", "gathers, reductions, update"),
            *((f"idle-{cause}", f"bubble: {cause}") for cause in _CAUSES),
        )
    )
    return (
        f'<section class="gantt"><h3>{badge(timeline.word)} pipeline: tasks of each device group</h3>'
        f'<div class="legend">{legend}</div><div class="scroll"><svg role="img" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" aria-label="{timeline.word} schedule of {len(names)} device groups">'
        f"{''.join(_axis(timeline.step, scale, height))}{rows}</svg></div></section>"
    )


def _row(timeline: Timeline, name: str, at: int, scale: float) -> Iterator[str]:
    top = TOP + ROW * at
    yield f'<text class="name" x="0" y="{top + 19}">group {at}</text>'
    for idle in idle_stretches(timeline, name):
        tooltip = f"bubble: {idle.cause}, {format_duration(idle.end - idle.start)}"
        yield rect(f"idle-{idle.cause}", idle.start, idle.end, top, scale, tooltip)
    for span in timeline.of(name):
        if span.end <= span.start:
            continue
        found = _tasks(span)
        if found:
            for place, one in enumerate(found):
                yield from _task(span, one, top, scale, place, len(found))
        elif is_compute(span.op.queue) or span.op.phase in ("gather", "reduce", "clip"):
            tooltip = f"{span.op.name}, {format_duration(span.end - span.start)}"
            yield rect("other", span.start, span.end, top, scale, tooltip)


def _tasks(span: Span) -> list[re.Match[str]]:
    """The task that a span is, the two of a pair, or none."""
    found = [_TASK.match(name) for name in span.op.name.split(PAIRED)]
    return [one for one in found if one is not None] if all(found) else []


def _task(span: Span, found: re.Match[str], top: int, scale: float, place: int, count: int) -> Iterator[str]:
    """The drawing of a task, at its place among the `count` that run as one."""
    letter, stage, micro_batch = found.groups()
    tooltip = (
        f"{_WORDS[letter]} of micro-batch {micro_batch} in stage {stage}: {format_duration(span.start)} to "
        f"{format_duration(span.end)}, {format_duration(span.end - span.start)}"
    )
    if count > 1:
        tooltip += f", together with {span.op.name.split(PAIRED)[1 - place]}"
    yield rect(f"task-{letter.lower()}", span.start, span.end, top, scale, tooltip, place, count)
    if (span.end - span.start) * scale >= 5 + 6 * len(micro_batch):
        middle = LEFT + (span.start + span.end) / 2 * scale
        down = 18 if count == 1 else 12 + 12 * place
        yield f'<text x="{middle:.1f}" y="{top + down}">{micro_batch}</text>'


def rect(
    kind: str, start: float, end: float, top: int, scale: float, tooltip: str, place: int = 0, count: int = 1
) -> str:
    """A stretch of a row, from `start` to `end` seconds, with its tooltip; one of `count` above
    each other."""
    height = (ROW - 6) // count
    return (
        f'<rect class="{kind}" x="{LEFT + start * scale:.2f}" y="{top + 2 + place * height}" '
        f'width="{(end - start) * scale:.2f}" height="{height}"><title>{escape(tooltip)}</title></rect>'
    )


def _axis(step: float, scale: float, height: int) -> Iterator[str]:
    """Lines and times at quarters of a step."""
    for part in range(5):
        at = step * part / 4
        x = LEFT + at * scale
        yield f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height}"/>'
        anchor = "end" if part == 4 else "middle" if part else "start"
        yield f'<text class="tick" x="{x:.1f}" y="12" style="text-anchor:{anchor}">{format_duration(at)}</text>'


# Gantt chart of a step of unlike parts: a row for each device group, its work, and its bubbles by cause.
#
# Causes: `fill` before a group's first task and `drain` after its last one; `imbalance`, another part still computes
# what the next task needs; `data`, as that, of a micro-batch with more work than the mean one, or a data rank with more
# rows' work; `communication`, computed and on its way, or a collective that nothing hides.

CAUSES = ("imbalance", "data", "communication", "fill", "drain")
WORK = ("encoder", "forward", "backward", "once")
_MEANING = {
    "encoder": "encoder",
    "forward": "forward pass",
    "backward": "backward pass",
    "once": "reductions, update, gathers",
    **{cause: f"bubble: {cause}" for cause in CAUSES},
}
_LANES_WIDTH = 1000.0
"""Of the drawing, which is stretched to the page."""
_LANES_LEAST, _LANES_MOST = 180.0, 6000.0
"""Pixels that it has at least; a page with fewer scrolls."""
_LANES_BLOCK = 6.0
"""Pixels of a task of mean length, at least."""


@dataclass(frozen=True)
class Stretch:
    """Seconds of a row: work, or a bubble of one cause."""

    kind: str
    """Of `WORK` or `CAUSES`."""
    start: float
    end: float
    title: str = ""


@dataclass(frozen=True)
class Lane:
    """A device group over a step."""

    name: str
    devices: int
    stretches: Sequence[Stretch]

    def seconds(self, kind: str) -> float:
        """Seconds of one kind."""
        return sum(one.end - one.start for one in self.stretches if one.kind == kind)


def shares(lanes: Sequence[Lane], devices: int, step: float) -> dict[str, float]:
    """Kind of work and cause of bubbles to its share of all devices' time; devices without a lane are `unused`."""
    whole = devices * step
    found = {kind: sum(one.devices * one.seconds(kind) for one in lanes) / whole for kind in (*WORK, *CAUSES)}
    return {**found, "unused": 1 - sum(one.devices for one in lanes) / devices}


def part_chart(title: str, lanes: Sequence[Lane], step: float, longest: float, word: str) -> str:
    """The chart as HTML, with an SVG drawing that needs no script and is as wide as the page. `longest`: seconds at the
    right edge, so that several charts have one scale."""
    tasks = [one for lane in lanes for one in lane.stretches if one.kind in WORK and one.end > one.start]
    mean = sum(one.end - one.start for one in tasks) / len(tasks)
    least, height = min(_LANES_MOST, max(_LANES_LEAST, _LANES_BLOCK * longest / mean)), ROW * len(lanes)
    scale = _LANES_WIDTH / longest
    drawn = [
        f'<line x1="{LEFT + part * _LANES_WIDTH / 4}" x2="{LEFT + part * _LANES_WIDTH / 4}" y1="0" y2="{height}"/>'
        for part in range(5)
    ]
    for at, lane in enumerate(lanes):
        for one in lane.stretches:
            if one.end > one.start:
                tooltip = f"{one.title or _MEANING[one.kind]}, {format_duration(one.end - one.start)}"
                drawn.append(rect(f"part-{one.kind}", one.start, one.end, ROW * at, scale, tooltip))
    shown = [kind for kind in (*WORK, *CAUSES) if any(lane.seconds(kind) for lane in lanes)]
    legend = "".join(f'<span><i class="part-{kind}"></i>{_MEANING[kind]}</span>' for kind in shown)
    ticks = "".join(f"<span>{format_duration(longest * part / 4)}</span>" for part in (0, 2, 4))
    names = "".join(f'<div style="height:{ROW}px">{lane.name}</div>' for lane in lanes)
    return (
        f'<section class="gantt"><h3>{badge(word)} {title}: {format_duration(step)}</h3><div class="legend">{legend}'
        f'</div><div class="scroll"><div class="lanes" style="grid-template-columns:auto minmax({least:.0f}px,1fr)">'
        f'<div></div><div class="ticks">{ticks}</div><div class="names">{names}</div>'
        f'<svg role="img" height="{height}" viewBox="{LEFT} 0 {_LANES_WIDTH:.0f} {height}" preserveAspectRatio="none" '
        f'aria-label="{word} step: {title}">{"".join(drawn)}</svg></div></div></section>'
    )
