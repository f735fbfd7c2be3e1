"""What others do about memory, as plans of the simulator that plans ours. Part of `offload.py`.

A policy is a graph, and moves on it; `problem.profile` says what is live and `replay` how long the step takes. Where
something is left open it is answered in the policy's favour:

- every link carries its full rate, and a storage that autograd saves twice goes once;
- `save_on_cpu` (also what torch's `offload_wrapper` puts around layers): what the backward pass uses of the forward
  pass goes when the forward pass has used it last, and comes back when it is used again. Its copies are on the stream
  that computes, so nothing runs beside them;
- a layer ahead: the same storages on streams of their own. One leaves while the next layer runs, and comes back while
  the layer before runs;
- `CPUOffloadPolicy` of FSDP2, on one device: parameters lie on the host, come a layer ahead and are freed after it, in
  the forward and again in the backward pass; gradients go to the host, where the optimizer runs when all are there.
  The update takes what ours takes there (`Cluster.host_seconds`), with the host to itself; what its norm reads is not
  counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import measure  # noqa: F401  (it has the tests' harness found)

from harness.check_moves import check_moves
from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph, layers
from hyper_parallel.graph.recompute import regather
from hyper_parallel.graph.step_context import layer_of, region_of
from hyper_parallel.offloading import OffloadTier, Problem, Rate, build_problem
from hyper_parallel.offloading.schedule.problem import Buffer, Move, UseInterval, replay
from hyper_parallel.workload.work import Work

_EARLY = ("forward", "loss")
_READ, _WRITTEN = 5 * 4, 4 * 4
"""Bytes for each element: clipping scales the gradient; the update reads it, the parameter and two moments, and writes
all but the first."""
_ROOM = 2**50


@dataclass(frozen=True)
class Point:
    """What a policy comes to. Simulated."""

    peak: int
    """Live bytes at the worst moment."""
    seconds: float
    """Of a step."""
    stall: float
    """Of it, seconds in which nodes wait for copies."""


@dataclass(frozen=True)
class Case:
    """A step on a device with one link to the host."""

    step: StepGraph
    cluster: Cluster
    link: Rate
    """Each way."""

    def problem(self, step: StepGraph | None = None) -> Problem:
        """The memory of the step, or of another graph for it, without a budget."""
        host = OffloadTier("host", _ROOM, self.link, self.link)
        return build_problem(step or self.step, self.cluster, _ROOM, (host,))


def none(case: Case) -> Point:
    """Everything stays."""
    return _point(case.problem(), ())


def layer_recompute(case: Case) -> Point:
    """Of each layer only its input stays for the backward pass."""
    return _point(case.problem(recomputed(case.step)), ())


def save_on_cpu(case: Case) -> Point:
    """`torch.autograd.graph.save_on_cpu`."""
    problem = case.problem()
    found = saved(case.step, problem)
    moves = [Move(held.storage, "host", gap, after, after, used) for held, gap, after, used in found]
    return _point(problem, moves)


def layer_ahead(case: Case) -> Point:
    """Activations on streams of their own, with a prefetch distance of one layer."""
    problem, borders = case.problem(), Borders.of(case.step)
    moves = []
    for held, gap, after, used in saved(case.step, problem):
        leave, fetch = borders.behind(after, 1), borders.before(used, 1)
        if leave < fetch:
            moves.append(Move(held.storage, "host", gap, after, leave, fetch))
    return _point(problem, moves)


def cpu_offload(case: Case, recompute: bool = False) -> Point:
    """FSDP2's `CPUOffloadPolicy`. `recompute`: with each layer computed again in the backward pass."""
    step = recomputed(case.step) if recompute else regather(case.step)
    problem, borders = on_the_host(step, case), Borders.of(step)
    n = problem.nodes
    home, update = n - 2, n - 1
    moves = []
    for held in problem.held:
        if held.state and held.kind == "parameter":
            for gap, (after, used) in enumerate(held.gaps(n)):
                # The copy on the host is up to date when the update has ended, which is the end of the step.
                fetch = borders.before(used, 1) if used < n else max(n, n + borders.before(used - n, 1))
                if after < fetch:
                    moves.append(Move(held.storage, "host", gap, None, after, fetch))
        elif held.busy[-1].first == update:
            after = held.busy[-2].last + 1
            leave = min(borders.behind(after, 1), home)
            moves.append(Move(held.storage, "gradients", len(held.busy) - 2, after, leave, update))
    found = _point(problem, moves)
    # While the host computes nothing is used on the device: gradients are held there in the problem only.
    return replace(found, peak=max(problem.profile(moves)[:update]))


def on_the_host(step: StepGraph, case: Case) -> Problem:
    """The forward and backward pass, a node at which all gradients are on the host, and one that is the update there.

    Of the optimizer's state the device has nothing. Parameters are written by the last node; gradients are used by it,
    and go over a link of their own, which brings nothing back.
    """
    whole, phases = case.problem(step), phases_of(step)
    home = phases.index("clip")
    update = home + 1
    elements = sum(held.bytes for held in whole.held if held.state and held.kind == "parameter") // 4
    work = Work("optimizer", read=elements * _READ, written=elements * _WRITTEN)
    begun = whole.starts[home]
    starts = (*whole.starts[:home], begun, begun, begun + case.cluster.host_seconds(work))

    def before_home(uses: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(replace(one, last=min(one.last, home - 1)) for one in uses if one.first < home)

    held = []
    for each in whole.held:
        busy = before_home(each.busy)
        if each.kind == "optimizer" or not busy:
            continue
        if each.kind == "gradient":
            busy = (*busy, UseInterval(update, update, writes=False))
        held.append(replace(each, busy=busy))
    gradients = OffloadTier("gradients", _ROOM, case.link, Rate(0.0, float("inf")))
    return Problem(starts, tuple(held), before_home(whole.taken), (*whole.spaces, gradients), _ROOM)


def recomputed(step: StepGraph) -> StepGraph:
    """The step with each layer computed again in the backward pass."""
    return layers(step, sorted({layer_of(node.meta["module"]) for node in step.nodes} - {""}))


def saved(step: StepGraph, problem: Problem) -> list[tuple[Buffer, int, int, int]]:
    """What autograd saves: (storage, gap, its first place, place of the next use) of each storage that the forward pass
    leaves to the backward pass. Parameters are not among them, what they are cast to is."""
    phases = phases_of(step)
    backward = phases.index("backward")
    found = []
    for held in problem.held:
        if held.state or not held.movable:
            continue
        for gap, (after, used) in enumerate(held.gaps(problem.nodes)):
            if after <= backward <= used and phases[after - 1] in _EARLY and after < used:
                found.append((held, gap, after, used))
    return found


@dataclass(frozen=True)
class Borders:
    """Where the nodes of each layer, and of the loss, begin in the forward and in the backward pass."""

    places: tuple[int, ...]
    """Ascending, with the first node and the end of the backward pass."""

    @classmethod
    def of(cls, step: StepGraph) -> Borders:
        """By the modules of the nodes. What lies between two layers belongs to the one before."""
        phases = phases_of(step)
        end = phases.index("clip")
        first: dict[tuple[str, bool], int] = {}
        for at, node in enumerate(list(step.nodes)[:end]):
            part = "loss" if phases[at] == "loss" else layer_of(node.meta["module"])
            if part:
                first.setdefault((part, phases[at] == "backward"), at)
        return cls(tuple(sorted({0, end, *first.values()})))

    def behind(self, place: int, layers: int) -> int:
        """The end of the layer, so many behind the one that ends at `place` or around it."""
        return self.places[min(bisect_left(self.places, place) + layers, len(self.places) - 1)]

    def before(self, place: int, layers: int) -> int:
        """Where the layer begins that is so many before the one of `place`."""
        return self.places[max(bisect_right(self.places, place) - 1 - layers, 0)]


def phases_of(step: StepGraph) -> list[str]:
    return [region_of(node).phase for node in step.nodes]


def _point(problem: Problem, moves: Sequence[Move]) -> Point:
    check_moves(problem, moves)
    replayed = replay(problem, moves)
    return Point(max(problem.profile(moves)), replayed.seconds, replayed.stall)
