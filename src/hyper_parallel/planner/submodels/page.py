"""The answer as one self-contained HTML page: verdict, steps drawn by part and rank, bubbles by cause, memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hyper_parallel.planner.submodels.answer import WORD, Answer, allocation, memory_of_parts
from hyper_parallel.planner.submodels.chart import colocated_lanes, disjoint_lanes
from hyper_parallel.planner.submodels.search import Found
from hyper_parallel.report.html import asset, badge, card, filled, sheet_table
from hyper_parallel.report.part_chart import CAUSES, WORK, Lane, part_chart, shares
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.units import format_bytes, format_duration

_SHOWN = 16
"""Rows of a chart."""


def page(answer: Answer) -> str:
    """The HTML text: the chosen allocation first, and the other one beside it."""
    found = answer.found
    both = [(name, one, _lanes(answer, one)) for name, one in answer.named() if one.sizes is not None]
    both.sort(key=lambda one: one[1] is not found.chosen)
    longest = max(one.steps[0].seconds for _, one, _ in both)
    chosen = found.chosen.sizes
    assert chosen is not None, "an answer has an allocation that fits"
    fullest = max(memory_of_parts(found.task, chosen).values())
    figures = (
        ("step", format_duration(found.chosen.seconds), f"{WORD}, mean of {len(found.task.steps)} steps"),
        ("idle", f"{found.chosen.bubbles:.1%}", "of all devices' time"),
        (
            "fullest device",
            format_bytes(fullest),
            f"estimated, of {format_bytes(found.task.capacity)} usable",
        ),
        ("devices", str(chosen.devices), f"of {found.task.devices}: {allocation(found.task, chosen)}"),
    )
    charts = []
    for name, one, lanes in both:
        assert one.sizes is not None, "only allocations that fit are drawn"
        what = "chosen" if one is found.chosen else "in its place"
        more = (
            f", the first {_SHOWN} of {len(lanes)} data ranks"
            if len(lanes) > _SHOWN and not one.sizes.encoders
            else ""
        )
        title = f"{what}, {name}: {escape(allocation(found.task, one.sizes))}{more}; the first step"
        shown = lanes if one.sizes.encoders else lanes[:_SHOWN]
        charts.append(part_chart(title, shown, one.steps[0].seconds, longest, WORD))
    notes = "".join(f"<li>{escape(note)}</li>" for note in answer.notes())
    slots = {
        "title": escape(f"{answer.title} on {answer.cluster}"),
        "verdict": f"{badge(WORD)} {escape(answer.verdict)}",
        "heading": escape(f"{answer.title} on {answer.cluster}"),
        "facts": "".join(
            card(name, f'<div class="value">{value}</div><p>{why}</p>') for name, value, why in figures
        ),
        "body": "".join(charts),
        "word": WORD,
        "tables": "".join(
            sheet_table(sheet, badge(WORD))
            for sheet in (_bubbles(answer, both), answer.sheet(), answer.parts())
        ),
        "notes": f"<h2>About these figures</h2><ul>{notes}</ul>",
        "style": asset("page.css") + asset("submodels.css"),
    }
    return filled("plan.html", slots)


def _lanes(answer: Answer, one: Found) -> list[Lane]:
    assert one.sizes is not None, "only allocations that fit are drawn"
    rows = disjoint_lanes if one.sizes.encoders else colocated_lanes
    return rows(answer.found.task, one.sizes, one.steps[0])


def _bubbles(answer: Answer, both: Sequence[tuple[str, Found, list[Lane]]]) -> Sheet:
    """Shares of all devices' time in the first step."""
    devices = answer.found.task.devices
    found = [shares(lanes, devices, one.steps[0].seconds) for _, one, lanes in both]
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
    return Sheet("time, and bubbles by cause", ("", *(name for name, _, _ in both)), rows, left=1, note=note)
