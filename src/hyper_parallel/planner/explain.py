"""Explains a strategy: where time and memory go, what one change would cost, what binds.

*What binds* is asked of the model: the same strategy is estimated on a machine that has twice of one thing, and with
twice the batch. What shortens a token's time most is what the strategy waits for. Memory binds where a change would
make the step quicker but does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.planner import format
from hyper_parallel.planner.columns import CODES, Array, Columns
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.format import AXES
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import SHARES, Question
from hyper_parallel.planner.space import ON_HOST, StrategySpace
from hyper_parallel.planner.table import DEGREES, SPREAD, Table
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.units import format_bytes, format_duration

# Neighbours of a strategy: the cost of each single change.
#
# An axis gets longer by a prime factor of the number of devices, and the axis shorter that pays for it: of all partners
# the one with which the step is quickest is shown. Only what is legal in the question's space is looked at. Settings
# that a change takes the ground from (a schedule without a pipeline, ZeRO without ranks to share with) follow it, and
# where several would do, those nearest to the strategy do.

FOLLOWERS = ("zero", "sequence_parallel", "method", "paired", "schedule", "virtual")
"""Settings that lose their ground, or get one, when an axis becomes 1 or more than 1."""

SETTINGS: tuple[tuple[str, ...], ...] = (
    ("expert",),
    ("micro",),
    ("zero",),
    ("sequence_parallel",),
    ("method",),
    ("schedule", "virtual"),
    ("recompute", "recomputed"),
    ("state_on_host",),
    ("activations_on_host",),
    ("weights_on_host",),
    ("order",),
)
"""The groups of settings, beside degrees, that one change may vary."""

PLAIN = ("micro", "zero", "sequence_parallel", "method")
"""Settings whose change is written as `name old → new`."""
TOLD: Mapping[Callable[[format.Strategy], str], tuple[str, ...]] = {
    format.schedule: ("schedule", "virtual"),
    format.recompute: ("recompute", "recomputed"),
}
"""Settings whose change is written together, by the function that formats them."""


@dataclass(frozen=True)
class Neighbour:
    """A strategy that differs in one respect."""

    change: str
    """`tensor_x 8 → 4, shard 32 → 64`"""
    figures: Figures


def neighbours(before: Figures, question: Question, constants: Constants) -> list[Neighbour]:
    """All of a strategy's neighbours, the quickest first, whether or not they fit."""
    row = before.row
    own = {name: float(getattr(row, name)[0]) for name in SPREAD}
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for names, columns in _groups_of_changes(own, question):
        seconds = _seconds(row, columns, constants)
        best: dict[tuple[str, ...], tuple[float, float, int]] = {}
        for index, seen in enumerate(seconds):
            changed = _changed(own, {name: float(column[index]) for name, column in columns.items()}, names)
            if changed is None:
                continue
            directions, others = changed
            rank = (others, float(seen), index)
            for direction in directions:
                if direction not in best or rank < best[direction]:
                    best[direction] = rank
        for direction, (_, _, index) in best.items():
            found[direction] = {name: float(column[index]) for name, column in columns.items()}
    if not found:
        return []
    rows = list(found.values())
    table = row.replaced(**{name: np.array([one[name] for one in rows]) for name in SPREAD})
    neighbours: dict[str, Neighbour] = {}
    for one in figures(table, estimate(table, constants)):
        change = _words(before, one)
        neighbours[change] = Neighbour(change, one)
    return sorted(neighbours.values(), key=lambda one: (one.figures.seconds, one.change))


def _groups_of_changes(
    own: dict[str, float], question: Question
) -> Iterator[tuple[tuple[str, ...], Columns]]:
    """Groups of columns that are changed together, with all legal rows in which only they differ, or what follows."""
    for factor in _primes(question.devices):
        near = {name: (own[name] / factor, own[name], own[name] * factor) for name in DEGREES}
        follow = {
            "zero": (0, 1, own["zero"]),
            "sequence_parallel": (0, 1),
            "method": range(len(CODES["method"])),
            "schedule": (0, own["schedule"]),
            "virtual": (1, own["virtual"]),
        }
        yield DEGREES, _legal(own, question, {**near, **follow})
    stays = "host" not in question.cluster.links
    for names in SETTINGS:
        if stays and names[0] in format.ON_HOST:
            continue
        values: dict[str, Iterable[float]] = {}
        for name in names:
            codes = CODES.get(name)
            if codes is not None:
                values[name] = range(len(codes))
            elif name == "zero":
                values[name] = range(4)
            elif name == "sequence_parallel":
                values[name] = (0, 1)
            elif name == "recomputed":
                # A whole number of the longest stage's layers: all, and one more or less than now.
                stage = math.ceil(question.workload.shape.layers / own["pipeline"])
                now = round(own[name] * stage)
                values[name] = [
                    layers / stage for layers in (now - 1, now + 1, stage) if 1 <= layers <= stage
                ]
            elif name in format.ON_HOST:
                # The next share to either side.
                below, above = (
                    [one for one in ON_HOST if one < own[name]],
                    [one for one in ON_HOST if one > own[name]],
                )
                values[name] = (own[name], *below[-1:], *above[:1])
            else:
                values[name] = (own[name] / 2, own[name], own[name] * 2)
        yield names, _legal(own, question, values)


def _legal(own: dict[str, float], question: Question, values: dict[str, Iterable[float]]) -> Columns:
    """All legal rows with columns as `own` has them, or as `values` allows and the question does."""
    fix: dict[str, Sequence[float]] = {}
    for name in SPREAD:
        allowed = question.allowed(name)
        some = {float(value) for value in values.get(name, (own[name],)) if _whole(name, value)}
        fix[name] = sorted(some if allowed is None else some & set(allowed)) or [own[name]]
    space = StrategySpace(replace(question, fix=fix))
    rows, _ = space.micro.expand(space.degrees())
    for level in (space.splits, space.orders, space.schedules):
        rows, _ = level.expand(rows)
    parts = [part for part in space.kept(rows) if part["micro"].size]
    if not parts:
        return {name: np.zeros(0) for name in SPREAD}
    return {name: np.concatenate([part[name] for part in parts]) for name in SPREAD}


def _whole(name: str, value: float) -> bool:
    return name in SHARES or (
        float(value).is_integer() and (value >= 1 or name in CODES or name in FOLLOWERS)
    )


def _seconds(row: Table, columns: Columns, constants: Constants) -> Array:
    """Seconds of each row's step."""
    n = columns["micro"].size
    if not n:
        return np.zeros(0)
    return np.broadcast_to(estimate(row.replaced(**columns), constants).seconds, n)


def _changed(
    own: dict[str, float], other: dict[str, float], names: tuple[str, ...]
) -> tuple[list[tuple[str, ...]], int] | None:
    """The changes that a row is, and the number of columns beside them; None where it is none, or more than one."""
    differs = [name for name in SPREAD if other[name] != own[name]]
    within = [name for name in differs if name in names]
    if not within:
        return None
    if names == DEGREES:
        if len(within) != 2:
            return None
        # The partner is free: one neighbour for each axis that grows, and one for each that shrinks.
        directions = [("longer" if other[name] > own[name] else "shorter", name) for name in within]
        return list(directions), len(differs) - 2
    return [(*names, *(str(other[name]) for name in names))], len(differs) - len(within)


def _words(before: Figures, after: Figures) -> str:
    """The difference in words."""
    old, new = before.strategy, after.strategy
    words = [f"{name} {old[name]} → {new[name]}" for name in AXES + PLAIN if old[name] != new[name]]
    for tell, names in TOLD.items():
        if any(old[name] != new[name] for name in names):
            words.append(f"{tell(old)} → {tell(new)}")
    words += [
        f"{float(old[name]):.0%} → {float(new[name]):.0%} of {what} on host"
        for name, what in format.ON_HOST.items()
        if old[name] != new[name]
    ]
    if old["order"] != new["order"]:
        words.append(f"laid {format.order(new)}")
    return ", ".join(words)


def _primes(number: int) -> list[int]:
    """The prime factors of a number, each once.

    >>> _primes(24)
    [2, 3]
    """
    found, divisor = [], 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            found.append(divisor)
            while number % divisor == 0:
                number //= divisor
        divisor += 1
    return [*found, number] if number > 1 else found


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
WITH_ROOTS = {"links within a node": "links below a root", "links within a supernode": "links between roots"}
"""Names of links where nodes have roots, whose links the columns of nodes then hold (`table.of_cluster`)."""


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
    limit: str
    """What keeps the step from being quicker, in a line."""
    changes: tuple[Neighbour, ...]
    eased: tuple[Eased, ...]

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


def explain(best: Figures, question: Question, constants: Constants) -> Explanation:
    """Why a strategy is what it is, of all that the question leaves open."""
    changes = tuple(neighbours(best, question, constants))
    eased = tuple(_eased(best.row, constants))
    if question.cluster.root:
        eased = tuple(replace(one, what=WITH_ROOTS.get(one.what, one.what)) for one in eased)
    # The quickest change that needs more memory than there is, and the quickest that fits and is slower.
    blocked = next((one for one in changes if _shorter(one, best) and not one.figures.fits), None)
    slower = (one for one in changes if one.figures.fits and one.figures.seconds > (1 + CLOSE) * best.seconds)
    sheets = (_time(best), _memory(best), _changes(best, changes), _twice(eased))
    return Explanation(
        tuple(one for one in sheets if one.rows),
        tuple(_binds(best, blocked, next(slower, None), eased)),
        _limit(best, blocked, eased),
        changes,
        eased,
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
        drop=("peak",),
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


def _limit(best: Figures, blocked: Neighbour | None, eased: Sequence[Eased]) -> str:
    """The limit that keeps the step from being quicker, in a line."""
    if blocked is not None:
        saves = format.signed(blocked.figures.seconds / best.seconds - 1)
        # What follows from a change of axes is in the details.
        change = blocked.change.partition(", sequence_parallel")[0]
        return f"memory: {change} ({saves}) needs {format_bytes(blocked.figures.peak)}"
    if eased and eased[0].saved > 0:
        return f"{eased[0].what}: twice of it saves {eased[0].saved:.0%}; memory does not bind"
    return "memory does not bind"


def _binds(
    best: Figures, blocked: Neighbour | None, next_best: Neighbour | None, eased: Sequence[Eased]
) -> Iterator[str]:
    """The limit that keeps the step from being quicker, in sentences."""
    if blocked is not None:
        yield (
            f"memory binds: {blocked.change} would take {format_duration(blocked.figures.seconds)} "
            f"({format.signed(blocked.figures.seconds / best.seconds - 1)}, estimated) but needs "
            f"{format.memory(blocked.figures)}"
        )
    else:
        yield (
            "memory does not bind: no single change that does not fit would be quicker (estimated; peak "
            f"{format.memory(best)})"
        )
    if next_best is not None:
        yield (
            f"the next best, one change away: {next_best.change}, {format_duration(next_best.figures.seconds)} "
            f"({format.signed(next_best.figures.seconds / best.seconds - 1)}, estimated)"
        )
    if eased and eased[0].saved > 0:
        yield f"what it waits for most: {eased[0].what}; twice of it saves {eased[0].saved:.0%} (estimated)"
