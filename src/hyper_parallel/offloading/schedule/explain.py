"""Explains an offload plan in words: transfers, waits, and the distance from the lower bound."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hyper_parallel.graph.regions import region_of
from hyper_parallel.offloading.schedule.linear_program import SolverError
from hyper_parallel.offloading.schedule.lower_bound import least_seconds
from hyper_parallel.offloading.schedule.offload_pass import Planned
from hyper_parallel.offloading.schedule.problem import Problem
from hyper_parallel.offloading.schedule.transfers import Move, replay
from hyper_parallel.trace import pattern
from hyper_parallel.units import format_bytes, format_duration

_SHOWN = 24
"""Lines of the table."""


@dataclass(frozen=True)
class _Row:
    """Moves that are alike: of the same sort of storage, between the same phases."""

    what: str
    space: str
    since: str
    until: str


def explained(found: Planned) -> str:
    """Several lines: the budget and the bounds, then a line for each sort of storage that moves.

    The bounds are computed only where HiGHS is installed.
    """
    problem, plan = found.problem, found.plan
    lines = [
        str(found),
        f"  no plan needs less than {format_bytes(plan.working_set)} (what single operators use), and this planner no "
        f"less than {format_bytes(plan.floor)}",
        _bounds(problem, plan.seconds),
        "",
    ]
    phases = [
        f"{region_of(node).phase}{' again' if node.meta['recomputed'] else ''}" for node in found.graph.nodes
    ]
    sorts: dict[_Row, list[Move]] = defaultdict(list)
    for move in plan.moves:
        sorts[_row(problem, phases, move)].append(move)
    waits = replay(problem, plan.moves).waits
    head = ("storages", "bytes", "away for", "waited for", "to", "from … to", "what")
    table = [head]
    largest = sorted(sorts.items(), key=lambda one: (-_bytes(problem, one[1]), str(one[0])))
    for row, moves in largest[:_SHOWN]:
        away = [_away(problem, move) for move in moves]
        table.append(
            (
                str(len(moves)),
                format_bytes(_bytes(problem, moves)),
                format_duration(sum(away) / len(away)),
                format_duration(sum(waits.get((move.storage, move.gap), 0.0) for move in moves)),
                row.space,
                f"{row.since} … {row.until}",
                row.what,
            )
        )
    widths = [max(len(cells[at]) for cells in table) for at in range(len(head) - 1)]
    lines += ["  ".join((*map(str.rjust, cells, widths), cells[-1])) for cells in table]
    if len(largest) > _SHOWN:
        others = [move for _, moves in largest[_SHOWN:] for move in moves]
        lines.append(f"and {len(others)} others, {format_bytes(_bytes(problem, others))} together")
    return "\n".join(lines)


def _bounds(problem: Problem, seconds: float) -> str:
    try:
        least = least_seconds(problem)
    except SolverError as error:
        return f"  how far from the best this is cannot be told: {error}"
    return (
        f"  no plan within the budget takes less than {format_duration(least)} a step (a lower bound by linear "
        f"programming); this one is predicted to take {format_duration(seconds)}, {seconds / least - 1:+.1%}"
    )


def _row(problem: Problem, phases: list[str], move: Move) -> _Row:
    held, n = problem.by_storage[move.storage], problem.nodes
    first, last = held.gaps(n)[move.gap]
    name = pattern(held.name.removeprefix(f"{held.kind}."))
    until = phases[last % n] + (" of the next step" if last >= n else "")
    return _Row(f"{held.kind} {name}", move.space, phases[first - 1], until)


def _bytes(problem: Problem, moves: list[Move]) -> int:
    return sum(problem.by_storage[move.storage].bytes for move in moves)


def _away(problem: Problem, move: Move) -> float:
    """Seconds between leaving and being fetched, when nothing waits."""
    return problem.comes(move.fetch) - problem.comes(move.leave)
