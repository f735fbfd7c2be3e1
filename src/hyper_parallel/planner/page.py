"""Page of a training answer: bars of time and memory, with the Pareto front of step time and device memory.

Everything is drawn by HTML and SVG that is written here; the only script switches between light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

import numpy as np

from hyper_parallel.planner import format
from hyper_parallel.planner.answer import Answer, Page
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import search
from hyper_parallel.planner.solve import Solved
from hyper_parallel.report.html import badge, filled, sheet_table
from hyper_parallel.units import format_bytes, format_duration

GIB = float(1 << 30)

COLOURS: Mapping[str, str] = {
    "products": "matmul",
    "attention": "attention",
    "elementwise": "elementwise",
    "again": "recompute",
    "head": "loss",
    "tensor": "all_reduce",
    "expert": "all_to_all",
    "context": "broadcast",
    "gathers": "backward",
    "gradients": "gradient",
    "sends": "send",
    "launches": "host",
    "uneven": "copy",
    "bubble": "view",
    "optimizer": "optimizer",
    "host": "reduce",
    "fixed": "input",
    "straggling": "other",
    "parameters": "parameter",
    "gathered": "backward",
    "activations": "activation",
    "logits": "loss",
    "working": "temporary",
}
"""The style sheet's colours by part of a step and kind of memory. In memory, the gradients' is the same."""

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 16, 40
"""The drawing of the front, and its margins, in its own units."""

MUCH = 3.0
"""Beyond this ratio of the slowest point to the quickest, seconds are drawn by their logarithm."""


def page_of(answer: Answer, solved: Solved, front: Sequence[Figures]) -> Page:
    """The page of an answer. `front`: the quickest strategies for less and less memory, the smallest first."""
    question, best = solved.question, solved.best[0]
    mark = badge(answer.word)
    shown = [(str(place), found) for place, found in enumerate(solved.best, 1)]
    if solved.compared is not None:
        shown.append(("yours", solved.compared))
    times = [
        (name, found.parts, format_duration(found.seconds), format.between(found)) for name, found in shown
    ]
    bytes = [(name, found.memory, format_bytes(found.peak), "") for name, found in shown]
    choices, *_, searched = answer.sheets
    slots = {
        "choices": f'<div id="choices">{sheet_table(choices, mark)}</div>',
        "sentences": "".join(f"<li>{escape(text)}</li>" for text in (*answer.sentences, *answer.notes)),
        "badge": mark,
        "time": _bars(times),
        "memory": _bars(bytes, limit=best.capacity),
        "front": _front(front, solved.best),
    }
    return Page(
        word=answer.word,
        title=f"{question.workload.shape.title} on {question.cluster.title}",
        verdict=answer.verdict.removeprefix(f"{answer.word}: "),
        heading=answer.heading.removeprefix(f"{answer.word} "),
        facts=answer.facts,
        body=filled("plan_body.html", slots),
        sheets=[*solved.why.sheets, searched],
        styles=("page.css", "plan.css"),
    )


def _bars(rows: Sequence[tuple[str, Mapping[str, float], str, str]], limit: float = 0.0) -> str:
    """Stacked bars on one scale: name, parts, what stands at the end, and what is added when pointed at."""
    whole = max([limit, *(sum(parts.values()) for _, parts, _, _ in rows)])
    total: dict[str, float] = {}
    for _, parts, _, _ in rows:
        for name, part in parts.items():
            total[name] = total.get(name, 0.0) + part
    kinds = [name for name, _ in format.largest(total, share=0.0)]
    cells = []
    for name, parts, end, more in rows:
        stack = "".join(_part(kind, parts.get(kind, 0.0), whole, sum(parts.values())) for kind in kinds)
        mark = f'<span class="limit" style="left:{100 * limit / whole:.2f}%"></span>' if limit else ""
        hint = f' title="90%: {escape(more)}"' if more else ""
        cells.append(
            f'<span class="name">{escape(name)}</span><div class="stack">{stack}{mark}</div>'
            f'<span class="end"{hint}>{escape(end)}</span>'
        )
    legend = "".join(f'<span><i style="{_fill(kind)}"></i>{kind}</span>' for kind in kinds)
    if limit:
        legend += f"<b>┆ device memory: {format_bytes(limit)}</b>"
    return "".join(cells) + f'<div class="legend">{legend}</div>'


def _part(kind: str, part: float, whole: float, own: float) -> str:
    if part < 5e-4 * whole:
        return ""
    hint = f"{kind}: {part / own:.1%}" + (f", {format.MEANING[kind]}" if kind in format.MEANING else "")
    return f'<i style="width:{100 * part / whole:.2f}%;{_fill(kind)}" title="{escape(hint)}"></i>'


def _fill(kind: str) -> str:
    return f"background:var(--{COLOURS.get(kind, 'other')})"


def _front(front: Sequence[Figures], best: Sequence[Figures]) -> str:
    """Seconds against bytes: the front as a line, the best strategies as points."""
    points = [*front, *best]
    capacity = best[0].capacity
    across = _Scale(0.0, max(capacity, *(one.peak for one in points)) / GIB, LEFT, WIDTH - RIGHT)
    slowest = max(one.seconds for one in points)
    quickest = min(one.seconds for one in points)
    if slowest > MUCH * quickest:
        down = _Scale(0.8 * quickest, 1.25 * slowest, HEIGHT - BOTTOM, TOP, ratio=True)
    else:
        down = _Scale(0.0, 1.05 * slowest, HEIGHT - BOTTOM, TOP)
    drawn = [*_grid(across, down, slowest)]
    limit = across.at(capacity / GIB)
    drawn.append(f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    drawn.append(
        f'<text class="limit" x="{limit - 5:.1f}" y="{TOP + 10}" text-anchor="end">device memory</text>'
    )
    if front:
        path = " ".join(
            f"{'L' if place else 'M'}{across.at(one.peak / GIB):.1f},{down.at(one.seconds):.1f}"
            for place, one in enumerate(front)
        )
        drawn.append(f'<path class="line" d="{path}"/>')
    for name, some in (("point", front), ("point best", best)):
        drawn += [
            f'<circle class="{name}" r="5" cx="{across.at(one.peak / GIB):.1f}" cy="{down.at(one.seconds):.1f}">'
            f"<title>{escape(_hint(one))}</title></circle>"
            for one in some
        ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="estimate seconds of a step against peak memory">'
        f"{''.join(drawn)}</svg><p>The line: the quickest strategy for each limit of memory. The other points: the "
        "best strategies of the table. Point at one to see what it is.</p>"
    )


def _hint(one: Figures) -> str:
    return (
        f"{format_duration(one.seconds)}, {format_bytes(one.peak)}: {format.axes(one.strategy)}; "
        f"{format.settings(one.strategy)}"
    )


class _Scale:
    """Values to places, along one axis: evenly, or by ratio where values differ much."""

    def __init__(self, least: float, most: float, begin: float, end: float, *, ratio: bool = False) -> None:
        self.least, self.most, self.begin, self.end, self.ratio = least, most, begin, end, ratio

    def at(self, value: float) -> float:
        if self.ratio:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values, five or so; by ratio: 1, 2 and 5 of each power of ten."""
        if self.ratio:
            powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
            values = [step * 10.0**power for power in powers for step in (1, 2, 5)]
            return [value for value in values if self.least <= value <= self.most]
        rough = (self.most - self.least) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
        return [step * count for count in range(int(self.most / step + 1e-9) + 1)]


def _grid(across: _Scale, down: _Scale, slowest: float) -> list[str]:
    floor = HEIGHT - BOTTOM
    drawn = []
    unit = format_duration(slowest).split()[1]
    factor = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}[unit]
    for value in down.ticks():
        y = down.at(value)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{value * factor:g}</text>')
    for value in across.ticks():
        x = across.at(value)
        drawn.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{value:g}</text>')
    drawn.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">peak memory of a device, GiB</text>'
    )
    drawn.append(
        f'<text class="label" transform="translate(14 {(TOP + floor) / 2}) rotate(-90)" text-anchor="middle">'
        f"{unit} a step{', by ratio' if down.ratio else ''}</text>"
    )
    return drawn


# Pareto front of step time and device memory.
#
# The search is asked again with less and less memory, in equal ratios from the whole device's down to what the smallest
# strategy of all needs. What a larger limit already gave is left out, so that the points are a front: none is both
# slower and larger than another.

STEPS = 8
"""Limits that are asked for between the least and the most."""


def front(question: Question, constants: Constants) -> list[Figures]:
    """The strategies of the front, the smallest first; empty where nothing fits."""
    device = question.cluster.device
    assert device is not None, "a table needs a device"
    one = replace(question, top=1)
    least = search(replace(one, objective="memory"), constants)
    if not least.best:
        return []
    found = [least.best[0]]
    # The smallest strategy fits in this and less: what an allocator loses is a constant's matter.
    lowest = min(1.0, 1.1 * least.best[0].peak / device.memory.bytes)
    for share in np.geomspace(lowest, 1.0, STEPS):
        memory = replace(device.memory, bytes=float(share) * device.memory.bytes)
        limited = replace(one.cluster, device=replace(device, memory=memory))
        found += search(replace(one, cluster=limited), constants).best
    return _undominated([replace(one, capacity=device.memory.bytes) for one in found])


def _undominated(points: list[Figures]) -> list[Figures]:
    """The strategies that no other is both quicker and smaller than, the smallest first."""
    kept: list[Figures] = []
    for one in sorted(points, key=lambda one: (one.peak, one.seconds)):
        if not kept or one.seconds < kept[-1].seconds:
            kept.append(one)
    return kept
