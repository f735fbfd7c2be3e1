"""Explains a strategy: where time and memory go, what one change would cost, what binds.

*What binds* is asked of the model: the same strategy is estimated on a machine that has twice of one thing, and with
twice the batch. What shortens a token's time most is what the strategy waits for. Memory binds where a change would
make the step quicker but does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.planner import format
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.neighbors import Neighbour, neighbours
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.table import Table
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.units import format_bytes, format_duration

SHOWN = 12
"""Changes that are shown; the quickest come first."""

CLOSE = 5e-4
"""Changes of a step by less than this share say nothing."""

TWICE: Mapping[str, tuple[str, ...]] = {
    "arithmetic": ("peak16", "peak8", "peak4"),
    "memory bandwidth": ("hbm",),
    "links within a node": ("node_rate",),
    "links within a supernode": ("supernode_rate",),
    "the network": ("network_rate",),
    "the link to the host": ("host_rate",),
    "sequences a step": ("batch",),
}
"""What is doubled, in turn, to see what a step waits for."""


@dataclass(frozen=True)
class Eased:
    """The same strategy where there is twice of one thing."""

    what: str
    saved: float
    """Share of a token's time that it saves; below 0: it costs."""


@dataclass(frozen=True)
class Explanation:
    """Why the best strategy is what it is."""

    sheets: tuple[Sheet, ...]
    sentences: tuple[str, ...]
    """What binds, in words."""
    changes: tuple[Neighbour, ...]
    eased: tuple[Eased, ...]
    blocked: Neighbour | None
    """The quickest change that needs more memory than there is; None where memory does not bind."""
    next_best: Neighbour | None
    """The quickest change that fits and is slower."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; times are seconds, memory is bytes; all are estimated."""
        return {
            "binds": list(self.sentences),
            "one_change": [
                {
                    "change": one.change,
                    "step_time_s": one.figures.seconds,
                    "peak_bytes": one.figures.peak,
                    "fits": one.figures.fits,
                }
                for one in self.changes
            ],
            "twice": {one.what: -one.saved for one in self.eased},
        }


def explain(row: Table, question: Question, constants: Constants) -> Explanation:
    """Why the strategy of a row is what it is, of all that the question leaves open."""
    best = figures(row, estimate(row, constants))[0]
    changes = tuple(neighbours(row, question, constants))
    eased = tuple(_eased(row, constants))
    blocked = next((one for one in changes if _shorter(one, best) and not one.figures.fits), None)
    slower = (one for one in changes if one.figures.fits and one.figures.seconds > (1 + CLOSE) * best.seconds)
    next_best = next(slower, None)
    sheets = (_time(best), _memory(best), _changes(best, changes), _twice(eased))
    sentences = tuple(_binds(best, blocked, next_best, eased))
    return Explanation(
        tuple(one for one in sheets if one.rows), sentences, changes, eased, blocked, next_best
    )


def _shorter(one: Neighbour, best: Figures) -> bool:
    return one.figures.seconds < (1 - CLOSE) * best.seconds


def _time(best: Figures) -> Sheet:
    rows = [
        (name, format.MEANING.get(name, ""), format_duration(part), f"{part / best.seconds:.1%}")
        for name, part in format.largest(best.parts)
    ]
    rest = best.seconds - sum(best.parts[row[0]] for row in rows)
    if rest > 1e-9 * best.seconds:
        rows.append(("everything else", "", format_duration(rest), f"{rest / best.seconds:.1%}"))
    return Sheet(
        "where the step goes",
        ("what", "which is", "seconds", "of step"),
        (*rows, ("step", "what each adds to the critical path", format_duration(best.seconds), "100.0%")),
        left=2,
    )


def _memory(best: Figures) -> Sheet:
    rows = [
        (name, format_bytes(part), f"{part / best.capacity:.1%}")
        for name, part in format.largest(best.memory)
    ]
    return Sheet(
        "where the memory goes, on the fullest device",
        ("kind", "bytes", "of device"),
        (*rows, ("sum", format_bytes(best.peak), f"{best.peak / best.capacity:.1%}")),
        note="what an allocator loses, and what lies outside of it, comes on top and must fit too",
    )


def _changes(best: Figures, changes: Sequence[Neighbour]) -> Sheet:
    # What does not fit says something only where it would be quicker.
    worth = [one for one in changes if one.figures.fits or _shorter(one, best)]
    rows = [
        (
            one.change,
            format_duration(one.figures.seconds),
            format.signed(one.figures.seconds / best.seconds - 1),
            format_bytes(one.figures.peak),
            "" if one.figures.fits else "does not fit",
        )
        for one in worth[:SHOWN]
    ]
    more = len(changes) - len(rows)
    return Sheet(
        "one change at a time",
        ("change", "step", "beside", "peak", ""),
        tuple(rows),
        note="the axis that pays for a longer one is the best there is"
        + (f"; {more} that are slower or do not fit are not shown" if more else ""),
    )


def _eased(row: Table, constants: Constants) -> list[Eased]:
    """The same strategy with twice of each, for what makes a difference; the largest first."""
    before = float(estimate(row, constants).seconds.max())
    found = []
    for what, columns in TWICE.items():
        twice = row.replaced(**{name: 2 * getattr(row, name) for name in columns})
        after = float(estimate(twice, constants).seconds.max())
        found.append(Eased(what, 1 - after / before / (2 if columns == ("batch",) else 1)))
    return sorted((one for one in found if abs(one.saved) >= 0.001), key=lambda one: -one.saved)


def _twice(eased: Sequence[Eased]) -> Sheet:
    return Sheet(
        "with twice of one thing",
        ("twice", "seconds a token"),
        tuple((one.what, format.signed(-one.saved)) for one in eased),
        note="the same strategy; what saves most is what it waits for",
    )


def _binds(
    best: Figures, blocked: Neighbour | None, next_best: Neighbour | None, eased: Sequence[Eased]
) -> list[str]:
    """What keeps the step from being quicker, in sentences."""
    found = []
    if blocked is not None:
        found.append(
            f"memory binds: {blocked.change} would take {format_duration(blocked.figures.seconds)} "
            f"({format.signed(blocked.figures.seconds / best.seconds - 1)}, estimated) but needs "
            f"{format.memory(blocked.figures)}"
        )
    else:
        found.append(
            "memory does not bind: no single change that does not fit would be quicker (estimated; peak "
            f"{format.memory(best)})"
        )
    if next_best is not None:
        one = next_best
        found.append(
            f"the next best, one change away: {one.change}, {format_duration(one.figures.seconds)} "
            f"({format.signed(one.figures.seconds / best.seconds - 1)}, estimated)"
        )
    if eased and eased[0].saved > 0:
        found.append(
            f"what it waits for most: {eased[0].what}; twice of it saves {eased[0].saved:.0%} (estimated)"
        )
    return found
