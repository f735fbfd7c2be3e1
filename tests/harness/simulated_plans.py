"""Steps of an offload plan as a Trace, for the simulator to say what `replay` says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from harness.traces import Ops, toy, trace
from hyper_parallel.offloading.schedule.problem import Move, Problem
from hyper_parallel.simulator import simulate
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.workload.work import Work


def step_ends(problem: Problem, moves: Iterable[Move], steps: int) -> list[float]:
    """Seconds at which each of so many steps ends, the first of which finds nothing under way."""
    n, moves = problem.nodes, sorted(moves, key=lambda move: (move.storage, move.gap))
    routes = {space.name: tier for space, tier in zip(problem.spaces, ("host", "pool"), strict=False)}
    held = {one.storage: one for one in problem.held}
    last_gap = {storage: len(one.gaps(n)) - 1 for storage, one in held.items()}
    took = [after - before for before, after in pairwise(problem.starts)]
    updates = {update.place: update for update in problem.updates}
    ops, ends = Ops(), []
    compute: tuple[int, ...] = ()
    copied: dict[tuple[int, int, bool], int] = {}
    worked: dict[int, int] = {}

    def copy(move: Move, out: bool) -> None:
        tier, space = routes[move.space], problem.spaces[list(routes).index(move.space)]
        seconds = (space.out if out else space.back).seconds(held[move.storage].bytes)
        rate = {("host", True): 1.0, ("host", False): 2.0}.get((tier, out), 4.0)  # of `toy`
        after = [*compute]
        if not out and move.gap == last_gap[move.storage] and move.storage in worked:
            after.append(worked[move.storage])
        route = f"device>{tier}" if out else f"{tier}>device"
        copied[move.storage, move.gap, out] = ops.copy("copy", seconds * rate, route, *after)  # type: ignore[arg-type]

    def wait(move: Move, out: bool) -> None:
        nonlocal compute
        begun = copied.get((move.storage, move.gap, out))
        if begun is not None:
            compute = (ops.add("wait", "compute", (*compute, begun)),)

    def used(move: Move) -> int:
        return held[move.storage].gaps(n)[move.gap][1]

    for _ in range(steps):
        for node in range(n):
            stores = [move for move in moves if move.store is not None]
            fetches = [
                move for move in moves if held[move.storage].returns or move.gap < last_gap[move.storage]
            ]
            for move in sorted(stores, key=lambda one: one.leave - (one.store or 0)):
                if (move.store or 0) % n == node:
                    copy(move, True)
            for move in stores:
                if move.leave % n == node:
                    wait(move, True)
            for move in sorted(fetches, key=lambda one: used(one) - one.fetch):
                if move.fetch % n == node:
                    copy(move, False)
            for move in fetches:
                if used(move) % n == node:
                    wait(move, False)
            if node in updates:
                update = updates[node]
                gradient = copied.get((update.gradient, last_gap[update.gradient], True))
                after = (*compute, *(() if gradient is None else (gradient,)))
                # `toy` takes so long for what it reads.
                unit = Costs(toy(), ranks=1).seconds(
                    ops.ops[ops.add("unit", "host", after, work=Work("optimizer", read=1))]
                )
                ops.ops.pop()
                work = Work("optimizer", read=update.seconds / unit)
                worked[update.parameter] = ops.add("update", "host", after, work=work)
            compute = (ops.kernel("node", took[node], *compute),)
        ends.append(compute[0])
    spans = simulate(trace(ops, ranks=1), toy(), masking=False).of("all")
    return [spans[end].end for end in ends]
