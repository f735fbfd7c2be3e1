"""The rules that moves obey, whoever chose them: written beside the planner, which never reads them.

**Valid slots.** What is fetched must be what the storage held when it left. A move without a store relies on a copy
that was made before, which holds as long as no busy stretch in between writes. The step repeats for ever, so that of
state "before" goes around the step's end; state that no node writes was put into its slot before the first step, and is
never stored again. A store begins when what it copies is final and the storage is there: behind the use that ends the
move before it.

**Room.** A storage has one slot in a space. Where the first thing that happens to it in a step is a store, the slot is
needed from its first store to the wait for its last fetch; otherwise it carries something over the step's end, and is
needed always. This is `Slot.rest` of the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from hyper_parallel.offloading.schedule.problem import Buffer, Move, Problem


def check_moves(problem: Problem, moves: Iterable[Move]) -> None:
    """Raise ValueError where moves break a rule of `Move`, read an invalid slot, or overfill a space."""
    known = {space.name: space.bytes for space in problem.spaces}
    found: dict[tuple[int, int], Move] = {}
    for move in moves:
        held = problem.by_storage.get(move.storage)
        if held is None:
            raise ValueError(f"{move}: there is no such storage")
        if not held.movable:
            raise ValueError(f"{move}: the storage may not move")
        if move.space not in known:
            raise ValueError(f"{move}: there is no such space")
        if (move.storage, move.gap) in found:
            raise ValueError(f"{move}: this gap has another move")
        _check_places(problem.nodes, held, move)
        found[move.storage, move.gap] = move
    for move in found.values():
        held = problem.by_storage[move.storage]
        if move.store is None and not _is_valid(held, move, found):
            raise ValueError(f"{move}: nothing in {move.space} holds what is in the storage")
        if move.store is not None and not _is_there(problem.nodes, held, move, move.store, found):
            raise ValueError(f"{move}: the storage is away, or on its way back, where its store begins")
    _check_must(problem, found)
    for space, needed in occupied(problem, found.values()).items():
        if max(needed, default=0) > known[space]:
            at = needed.index(max(needed))
            raise ValueError(
                f"{space} has {known[space]:,} bytes; {needed[at]:,} are to lie there at node {at}"
            )


def occupied(problem: Problem, moves: Iterable[Move]) -> dict[str, list[int]]:
    """Bytes that are needed in each space at each node."""
    n = problem.nodes
    # Of each slot: place in a step and turn at that place of all that happens to it.
    events: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for move in moves:
        held = problem.by_storage[move.storage]
        gaps = held.gaps(n)
        told = events[move.storage, move.space]
        told.append((move.leave % n, 1))
        if held.must is not None and not held.returns and move.gap == len(gaps) - 1:
            told.append((held.must.update, 3))
        else:
            told += [(move.fetch % n, 2), (gaps[move.gap][1] % n, 3)]
        if move.store is not None:
            told.append((move.store % n, 0))
    changes: dict[str, list[int]] = {space.name: [0] * (n + 1) for space in problem.spaces}
    for (storage, space), told in events.items():
        count = problem.by_storage[storage].bytes
        first, last = (min(told)[0], max(told)[0] + 1) if min(told)[1] == 0 else (0, n)
        changes[space][first] += count
        changes[space][last] -= count
    return {space: list(accumulate(change))[:n] for space, change in changes.items()}


def _check_must(problem: Problem, found: dict[tuple[int, int], Move]) -> None:
    """What the host computes on is in its slot by then, and comes back afterwards."""
    n = problem.nodes
    for held in problem.held:
        if held.must is None:
            continue
        move = found.get((held.storage, len(held.gaps(n)) - 1))
        if move is None:
            raise ValueError(
                f"storage {held.storage} has to be away in its last gap: the host computes in its slot"
            )
        if any(one.space != held.must.space for one in found.values() if one.storage == held.storage):
            raise ValueError(
                f"{move}: the host computes in {held.must.space}, where all its moves have to lead"
            )
        if held.state and (move.store is not None or not move.leave <= held.must.update < move.fetch):
            raise ValueError(
                f"{move}: it leaves without a store, before the host's update at {held.must.update}, and is fetched "
                "behind it"
            )
        if not held.state and not (move.leave <= held.must.update and move.fetch == n):
            raise ValueError(
                f"{move}: it leaves before the host's update at {held.must.update}, and for good: fetch is {n}"
            )


def _check_places(n: int, held: Buffer, move: Move) -> None:
    gaps = held.gaps(n)
    if not 0 <= move.gap < len(gaps):
        raise ValueError(f"{move}: the storage has {len(gaps)} gaps")
    after, used = gaps[move.gap]
    if not after <= move.leave < move.fetch <= used:
        raise ValueError(f"{move}: places must be {after} ≤ leave < fetch ≤ {used}, the gap between two uses")
    opens = held.opens(n)[move.gap]
    if move.store is not None and not opens <= move.store <= move.leave:
        raise ValueError(
            f"{move}: the store must begin from {opens} on, where what it copies is final, and not behind the leave"
        )


def _is_there(n: int, held: Buffer, move: Move, store: int, found: dict[tuple[int, int], Move]) -> bool:
    """Whether no other move has the storage away, or under way, where the store of this one begins."""
    gaps = held.gaps(n)
    for at in range(len(gaps)):
        if at != move.gap and (held.storage, at) in found:
            # As late as it can be before the move: of a later gap it is the step before's.
            used = gaps[at][1] - (n if at > move.gap else 0)
            if store <= used:
                return False
    return True


def _is_valid(held: Buffer, move: Move, found: dict[tuple[int, int], Move]) -> bool:
    """Walk back to the store that a move without one relies on."""
    for back in range(len(held.busy)):
        at = move.gap - back
        if at < 0 and not held.state:
            return False
        before = found.get((held.storage, at % len(held.busy)))
        if before is not None and before.space == move.space and before.store is not None:
            return True
        if held.busy[at].writes:
            return False
    # Nobody writes it.
    return held.state
