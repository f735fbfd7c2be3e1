"""Every plan of a tiny problem, and what a plan comes to in the long run: beside them planners and bounds are held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise, product

from harness.check_moves import check_moves
from hyper_parallel.offloading.schedule.problem import Buffer, Move, Problem


def long_run(problem: Problem, moves: Iterable[Move], steps: int = 60) -> float:
    """Seconds of a step once the plan's steps repeat. Written beside `moves.replay`."""
    n, moves = problem.nodes, list(moves)
    held = {one.storage: one for one in problem.held}
    rates = {space.name: (space.out, space.back) for space in problem.spaces}
    at_place: dict[int, list[tuple[int, tuple[int, int, int], int]]] = defaultdict(list)
    """(0 begin a store, 1 wait for it, 2 begin a fetch, 3 wait for it), its turn, number of the move."""
    for number, move in enumerate(moves):
        used = held[move.storage].gaps(n)[move.gap][1]
        if move.store is not None:
            key = (move.leave - move.store, move.storage, move.gap)
            at_place[move.store % n].append((0, key, number))
            at_place[move.leave % n].append((1, key, number))
        key = (used - move.fetch, move.storage, move.gap)
        at_place[move.fetch % n].append((2, key, number))
        at_place[used % n].append((3, key, number))
    for todo in at_place.values():
        todo.sort()
    took = [after - before for before, after in pairwise(problem.starts)]
    free: dict[tuple[str, int], float] = defaultdict(float)
    over: dict[tuple[int, int], float] = {}
    now, seen = 0.0, []
    for _ in range(steps):
        for at in range(n):
            for what, _, number in at_place.get(at, ()):
                move, way = moves[number], what // 2
                if what % 2:
                    now = max(now, over.get((number, way), 0.0))
                    continue
                link = (move.space, way)
                seconds = rates[move.space][way].seconds(held[move.storage].bytes)
                free[link] = over[number, way] = max(now, free[link]) + seconds
            now += took[at]
        # What is still under way decides how the next step goes.
        seen.append((now, {key: round(max(0.0, end - now), 12) for key, end in over.items()}))
        for before, (then, was) in enumerate(seen[:-1]):
            if was == seen[-1][1]:
                return (now - then) / (len(seen) - 1 - before)
    raise AssertionError(f"the steps of {moves} do not repeat")


def plans(problem: Problem, most: int = 20_000) -> Iterator[tuple[Move, ...]]:
    """Every plan whose live bytes keep to the budget. Raises ValueError where there are too many to look at."""
    choices = [list(_choices(problem, held, gap)) for held in problem.held for gap in _gaps(problem, held)]
    count = 1
    for one in choices:
        count *= len(one)
    if count > most:
        raise ValueError(f"{count:,} plans are too many")
    for chosen in product(*choices):
        moves = tuple(move for move in chosen if move is not None)
        if max(problem.profile(moves)) > problem.budget:
            continue
        try:
            check_moves(problem, moves)
        except ValueError:
            continue
        yield moves


def _gaps(problem: Problem, held: Buffer) -> range:
    return range(len(held.gaps(problem.nodes)) if held.movable else 0)


def _choices(problem: Problem, held: Buffer, gap: int) -> Iterator[Move | None]:
    yield None
    first, last = held.gaps(problem.nodes)[gap]
    opens = held.opens(problem.nodes)[gap]
    for space in problem.spaces:
        for leave in range(first, last):
            for fetch in range(leave + 1, last + 1):
                for store in (None, *range(opens, leave + 1)):
                    yield Move(held.storage, space.name, gap, store, leave, fetch)
