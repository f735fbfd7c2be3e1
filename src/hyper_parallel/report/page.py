"""Timelines as one self-contained HTML page.

Figures and tables are plain HTML. The timeline and the memory over time are drawn on canvases by `assets/page.js`
from data that is embedded as JSON: times in nanoseconds, each the difference from the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from hyper_parallel.report.html import asset, badge, card, embedded, filled, gantt, sheet_table
from hyper_parallel.report.perfetto import described, lanes
from hyper_parallel.report.pipeline import PipelineFigures
from hyper_parallel.report.sheets import (
    NONE,
    Fact,
    describe_ranks,
    facts,
    heading,
    sheets,
    shown_together,
    task_facts,
    task_sheets,
    verdict,
    word,
)
from hyper_parallel.trace import KINDS, Op, Span, Timeline
from hyper_parallel.units import format_bytes, format_count


def page(
    timelines: Timeline | Sequence[Timeline],
    title: str = "A training step",
    pipeline: PipelineFigures | None = None,
) -> str:
    """The HTML text. Several timelines share one scale of time; their figures stand side by side.

    `pipeline`: of a timeline of a pipeline's tasks, which is drawn as a Gantt chart too.
    """
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    assert shown, "a page shows at least one timeline"
    data = [_data(timeline) for timeline in shown]
    slots = {
        "title": escape(title),
        "word": escape(shown_together(shown)),
        "verdicts": "".join(
            f'<p class="verdict">{badge(word(one))} {escape(_behind(word(one), verdict(one)))}</p>'
            for one in shown
        ),
        "headings": "".join(
            f"<p>{badge(one.word)} {escape(heading(one).removeprefix(one.word + ' '))}</p>" for one in shown
        ),
        "facts": _facts(shown, facts if pipeline is None else task_facts),
        "pipeline": "".join(map(gantt, shown)) if pipeline else "",
        "timelines": "".join(_frame(number, one) for number, one in enumerate(shown)),
        "tables": _tables(shown) if pipeline is None else _pipeline_tables(shown[0], pipeline),
        "style": asset("page.css"),
        "script": asset("page.js"),
        "data": embedded(data),
    }
    return filled("page.html", slots)


def _behind(word: str, sentence: str) -> str:
    """A sentence that begins with a word and a colon, without them."""
    rest = sentence.removeprefix(f"{word}: ")
    return rest[:1].upper() + rest[1:]


def _told_apart(shown: Sequence[Timeline]) -> list[str]:
    """A label for each timeline: predicted or measured, and the cluster if that repeats."""
    words = [timeline.word for timeline in shown]
    return [
        word if words.count(word) == 1 else f"{word}, {timeline.cluster or timeline.device}"
        for word, timeline in zip(words, shown, strict=True)
    ]


def _facts(shown: Sequence[Timeline], of_timeline: Callable[[Timeline], list[Fact]]) -> str:
    """A card for each figure, with the values of all timelines."""
    tags = [f"<small>{escape(tag)}</small>" for tag in _told_apart(shown)] if len(shown) > 1 else [""]
    found = [{fact.name: fact for fact in of_timeline(timeline)} for timeline in shown]
    names = dict.fromkeys(name for one in found for name in one)
    cards = []
    for name in names:
        of = [one.get(name, Fact(name, NONE)) for one in found]
        values = [
            f'<div class="value">{escape(fact.value)}{tag}</div>' for fact, tag in zip(of, tags, strict=True)
        ]
        meanings = [f"<p>{escape(fact.meaning)}</p>" for fact in of]
        if len(set(meanings)) == 1:
            meanings = [*[""] * (len(of) - 1), meanings[0]]
        body = "".join(value + meaning for value, meaning in zip(values, meanings, strict=True))
        cards.append(card(name, body))
    return "".join(cards)


def _frame(number: int, timeline: Timeline) -> str:
    """The canvas on which the script draws a timeline."""
    where = escape(timeline.cluster or timeline.device)
    return (
        f'<section class="timeline" data-number="{number}"><h3>{badge(timeline.word)} timeline on {where}</h3>'
        '<div class="lanes"><canvas tabindex="0" role="application" aria-describedby="keys" '
        f'aria-label="{timeline.word} timeline of {len(timeline.spans)} ops"></canvas></div>'
        '<div class="memory-head"><h3>memory over time</h3><select aria-label="rank class"></select>'
        '<select aria-label="memory tier"></select><span class="legend"></span></div>'
        f'<div class="memory"><canvas role="img" aria-label="{timeline.word} memory over time"></canvas></div>'
        '<p class="picked" aria-live="polite"></p></section>'
    )


def _tables(shown: Sequence[Timeline]) -> str:
    """Tables with the same title, side by side."""
    found = [{sheet.title: sheet for sheet in sheets(timeline)} for timeline in shown]
    titles = dict.fromkeys(title for one in found for title in one)
    blocks = []
    for title in titles:
        tables = [
            sheet_table(one[title], badge(timeline.word)) if title in one else "<div></div>"
            for timeline, one in zip(shown, found, strict=True)
        ]
        blocks.append("".join(tables) if len(shown) == 1 else f'<div class="pair">{"".join(tables)}</div>')
    return "".join(blocks)


def _pipeline_tables(timeline: Timeline, pipeline: PipelineFigures) -> str:
    """Tables of a timeline of tasks, which has no kernels."""
    return "".join(
        sheet_table(sheet, badge(timeline.word)) for sheet in (*pipeline.sheets(), *task_sheets(timeline))
    )


def _data(timeline: Timeline) -> dict[str, Any]:
    """The data that the script draws."""
    labels: dict[tuple[str, ...], int] = {}
    classes = [_class(timeline, name, labels) for name in timeline.trace.ops]
    names: dict[str, int] = {}
    rows = [[names.setdefault(text, len(names)) for text in label] for label in labels]
    return {
        "word": timeline.word,
        "step": _nano(timeline.step),
        "kinds": KINDS,
        "capacity": dict(timeline.capacity),
        "classes": classes,
        "names": list(names),
        "labels": rows,
    }


def _class(timeline: Timeline, name: str, labels: dict[tuple[str, ...], int]) -> dict[str, Any]:
    spans = timeline.of(name)
    by_lane: dict[str, list[Span]] = {lane: [] for lane in lanes(spans)}
    for span in spans:
        if span.engine in by_lane and span.end > min(span.start, span.ready):
            by_lane[span.engine].append(span)
    return {
        "name": name,
        "ranks": ("ranks " if timeline.trace.size(name) > 1 else "rank ") + describe_ranks(timeline, name),
        "lanes": [{"name": lane, **_lane(of, labels)} for lane, of in by_lane.items()],
        "memory": {tier: _memory(timeline, name, tier) for tier in timeline.trace.tiers},
    }


def _lane(spans: list[Span], labels: dict[tuple[str, ...], int]) -> dict[str, list[int]]:
    starts, lengths, waits, kinds = [], [], [], []
    before = 0
    for span in sorted(spans, key=lambda span: (span.start, span.op.index)):
        start = _nano(span.start)
        starts.append(start - before)
        before = start
        lengths.append(_nano(span.end) - start)
        waits.append(start - _nano(span.ready) if span.op.collective else 0)
        op = span.op
        label = (op.name, op.module, op.part, op.sort, _details(op))
        kinds.append(labels.setdefault(label, len(labels)))
    found = {"t": starts, "d": lengths, "l": kinds}
    return {**found, "w": waits} if any(waits) else found


def _details(op: Op) -> str:
    """Details of an op besides its name, module, phase and kind."""
    units = {"flops": format_count, "bytes": format_bytes}
    lines = []
    for key, value in described(op).items():
        if key in units:
            assert isinstance(value, int | float)
            lines.append(f"{units[key](value)} {'FLOPs' if key == 'flops' else ''}".strip())
        elif key not in ("op", "module", "phase", "queue", "kind"):
            lines.append(f"{value} ranks" if key == "ranks" else f"{key} {value}")
    return ", ".join(lines)


def _memory(timeline: Timeline, name: str, tier: str) -> dict[str, list[int]]:
    """Changes: nanoseconds since the one before, the kind's number, bytes more or less."""
    curve = timeline.memory(name, tier)
    found: dict[str, list[int]] = {"t": [], "k": [], "b": []}
    numbers = [KINDS.index(kind) for kind in curve.by_kind]
    held = [0] * len(numbers)
    before = 0
    for time, row in zip(curve.times, zip(*curve.by_kind.values(), strict=True), strict=False):
        for at, value in enumerate(row):
            if value != held[at]:
                now = _nano(time)
                found["t"].append(now - before)
                found["k"].append(numbers[at])
                found["b"].append(value - held[at])
                held[at], before = value, now
    return found


def _nano(seconds: float) -> int:
    return round(seconds * 1e9)
