"""Gantt chart of a step of unlike parts: a row for each device group, its work, and its bubbles by cause.

Causes: `fill` before a group's first task and `drain` after its last one; `imbalance`, another part still computes what
the next task needs; `data`, as that, of a micro-batch with more work than the mean one, or a data rank with more rows'
work; `communication`, computed and on its way, or a collective that nothing hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.report.gantt import LEFT, ROW, rect
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
_WIDTH = 1000.0
"""Of the drawing, which is stretched to the page."""
_LEAST, _MOST = 180.0, 6000.0
"""Pixels that it has at least; a page with fewer scrolls."""
_BLOCK = 6.0
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
        """Of one kind."""
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
    least, height = min(_MOST, max(_LEAST, _BLOCK * longest / mean)), ROW * len(lanes)
    scale = _WIDTH / longest
    drawn = [
        f'<line x1="{LEFT + part * _WIDTH / 4}" x2="{LEFT + part * _WIDTH / 4}" y1="0" y2="{height}"/>'
        for part in range(5)
    ]
    for at, lane in enumerate(lanes):
        for one in lane.stretches:
            if one.end > one.start:
                told = f"{one.title or _MEANING[one.kind]}, {format_duration(one.end - one.start)}"
                drawn.append(rect(f"part-{one.kind}", one.start, one.end, ROW * at, scale, told))
    shown = [kind for kind in (*WORK, *CAUSES) if any(lane.seconds(kind) for lane in lanes)]
    legend = "".join(f'<span><i class="part-{kind}"></i>{_MEANING[kind]}</span>' for kind in shown)
    ticks = "".join(f"<span>{format_duration(longest * part / 4)}</span>" for part in (0, 2, 4))
    names = "".join(f'<div style="height:{ROW}px">{lane.name}</div>' for lane in lanes)
    return (
        f'<section class="gantt"><h3>{badge(word)} {title}: {format_duration(step)}</h3><div class="legend">{legend}'
        f'</div><div class="scroll"><div class="lanes" style="grid-template-columns:auto minmax({least:.0f}px,1fr)">'
        f'<div></div><div class="ticks">{ticks}</div><div class="names">{names}</div>'
        f'<svg role="img" height="{height}" viewBox="{LEFT} 0 {_WIDTH:.0f} {height}" preserveAspectRatio="none" '
        f'aria-label="{word} step: {title}">{"".join(drawn)}</svg></div></div></section>'
    )
