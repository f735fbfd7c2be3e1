"""Gantt chart of a step of unlike parts: a row for each device group, its work, and its bubbles by cause.

Causes: `fill` before a group's first task and `drain` after its last one; `imbalance`, another part still computes what
the next task needs; `data`, as that, of a micro-batch with more work than the mean one, or a data rank with more rows'
work; `communication`, computed and on its way, or a collective that nothing hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.report.gantt import LEFT, ROW, TOP, axis, rect
from hyper_parallel.report.html import badge
from hyper_parallel.units import format_duration

CAUSES = ("imbalance", "data", "communication", "fill", "drain")
WORK = ("encoder", "forward", "backward", "once")
_MEANING = {
    "encoder": "encoder",
    "forward": "forward pass",
    "backward": "backward pass",
    "once": "reductions, update, gathers",
    **{cause: f"bubble: {cause}" for cause in CAUSES},
}
_LEAST, _MOST = 320.0, 6000.0
"""Width of the drawing, in pixels."""
_BLOCK = 11.0
"""Width of a task of mean length, in pixels."""
_LETTER = 6.5
"""Width of a letter of a row's name, in pixels."""


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
        """Of one kind."""
        return sum(one.end - one.start for one in self.stretches if one.kind == kind)


def shares(lanes: Sequence[Lane], devices: int, step: float) -> dict[str, float]:
    """Kind of work and cause of bubbles to its share of all devices' time; devices without a lane are `unused`."""
    whole = devices * step
    found = {kind: sum(one.devices * one.seconds(kind) for one in lanes) / whole for kind in (*WORK, *CAUSES)}
    return {**found, "unused": 1 - sum(one.devices for one in lanes) / devices}


def part_chart(title: str, lanes: Sequence[Lane], step: float, longest: float, word: str) -> str:
    """The chart as HTML, with an SVG drawing that needs no script. `longest`: seconds at the right edge, so
    that several charts have one scale."""
    tasks = [one for lane in lanes for one in lane.stretches if one.kind in WORK and one.end > one.start]
    mean = sum(one.end - one.start for one in tasks) / len(tasks)
    names = max(LEFT, 14 + int(_LETTER * max(len(one.name) for one in lanes)))
    width = min(_MOST, max(_LEAST, names + _BLOCK * longest / mean))
    scale, shift = (width - names - 10) / longest, names - LEFT
    height = TOP + ROW * len(lanes) + 8
    rows = []
    for at, lane in enumerate(lanes):
        top = TOP + ROW * at
        rows.append(f'<text class="name" x="{-shift}" y="{top + 19}">{lane.name}</text>')
        for one in lane.stretches:
            if one.end > one.start:
                told = f"{one.title or _MEANING[one.kind]}, {format_duration(one.end - one.start)}"
                rows.append(rect(f"part-{one.kind}", one.start, one.end, top, scale, told))
    shown = [kind for kind in (*WORK, *CAUSES) if any(lane.seconds(kind) for lane in lanes)]
    legend = "".join(f'<span><i class="part-{kind}"></i>{_MEANING[kind]}</span>' for kind in shown)
    return (
        f'<section class="gantt"><h3>{badge(word)} {title}: {format_duration(step)}</h3><div class="legend">{legend}'
        f'</div><div class="scroll"><svg role="img" width="{width:.0f}" height="{height}" '
        f'viewBox="{-shift} 0 {width:.0f} {height}" aria-label="{word} step: {title}">'
        f"{''.join(axis(longest, scale, height))}{''.join(rows)}</svg></div></section>"
    )
