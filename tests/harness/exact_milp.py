"""A lower bound near to the optimum for small problems: whole copies, in a mixed-integer program.

Of each gap g that holds a node k at which the step exceeds the budget, with T the step's places and all of the places
counted around the step's end (binaries U, V; the rest is ≥ 0):

    U(g,k) ≥ U(g,k−1)   it has left by node k            V(g,k) ≥ V(g,k−1), V ≤ U   it is fetched right behind node k
    Σ_g bytes · (U(g,k) − V(g,k−1))  ≥  live bytes of k − budget                          memory, at every such node
    Σ stored(v,t) over slices t until the leaves at k are over  ≥  U(g,k)      v: what g holds since its last write
    Σ fetched(g,t) over slices t before the fetches behind k begin  ≤  V(g,k−1);     Σ fetched(g,t) = V(g, last)
    Σ seconds · stored(·,t) ≤ length of slice t,    Σ seconds · fetched(·,t) ≤ length of slice t     one link each way
    length of t = Σ seconds of nodes in it + Σ waits in it;            minimise Σ waits

Right before node k the host comes to k, waits for leaves (`out`), begins fetches, and waits for uses (`back`), and then
the node runs. A link's slices lie between those of the 3n moments at which something may begin on it, or must be over.

**Why it is a bound.** Take a plan whose steps repeat, as `replay` runs it, with its times in the repeated step (where a
few steps repeat together, their mean: with the places given, all rows are linear in times). Put U and V as its places
say, and stored and fetched as the shares that the links have carried. A store begins when the host comes to its place
or later, which is not before what it copies is final; its leave waits for it. A fetch begins behind the leaves of its
place; the next use waits for it. A copy is never under way for longer than its window, so that what is under way from
one step to the next is in the slices twice at no time. So every row holds, but for one change that only widens windows
and frees no byte that is asked for: a leave is put off to the next node that exceeds the budget, a fetch is begun right
behind the last such node, and gaps without such a node stay. What is left out makes the bound lower: that a link
carries one copy after the other, in the order in which they were begun, and what fits into the space.

**Covers.** Of the row of memory of a node, with x(g) = U(g,k) − V(g,k−1) of 0 or 1, and any set D of gaps that do not
free enough, r bytes too few: what is left to free has to come from the others, and none of them is of more use than r
(knapsack cover inequalities: Carr, Fleischer, Leung and Phillips, SODA 2000),

    Σ_g∉D min(bytes, r) · x(g)  ≥  r

Those that the relaxed program breaks are added to it, round by round, before the solver begins.

The solver's own bound is taken as it is: with its tolerance of 1e-6 in each row, and not worked out anew.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import highspy
import numpy as np

from hyper_parallel.offloading.schedule.idle_intervals import gaps_of
from hyper_parallel.offloading.schedule.problem import Move, Problem

SHORT = 1e-6
"""Of the step: a node that takes less counts as a wait for leaves behind it, which any step may have, since the solver
cannot tell so little from nothing."""
ROUNDS = 12
"""Times that covers are looked for, at most, and"""
BROKEN = 1e-3
"""by how much, of r, they must be broken to be added."""
COMES, GONE, BEGINS = 0, 1, 2
"""Moments of a place: the host comes, the leaves are over, the node begins."""


@dataclass(frozen=True)
class Proved:
    """What the solver has found in its time."""

    bound: float
    """Seconds of a step that no plan goes below."""
    seconds: float
    """Of a step in the best solution of the program, which copies may share a link in; infinity where there is none."""
    closed: bool
    """Bound and solution have met, to what was asked for; else the solver was stopped by its time."""


@dataclass
class _Gap:
    """One that is of use, with its places counted on from those of its step."""

    row: int
    seconds_back: float
    over: list[int]
    """Nodes in it that exceed the budget."""
    left: list[int]
    """Variables: it has left by each of them,"""
    fetched: list[int]
    """and is fetched behind each of them."""


@dataclass
class Asked:
    """The row of memory at a node: a gap frees its share of what is asked for where `left` is 1 and `fetched` 0."""

    left: list[int] = field(default_factory=list)
    fetched: list[int | None] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def terms(self, factors: Iterable[float]) -> list[tuple[int, float]]:
        """Σ factor · (left − fetched)."""
        found = []
        for left, fetched, factor in zip(self.left, self.fetched, factors, strict=True):
            if factor > 0:
                found.append((left, factor))
                if fetched is not None:
                    found.append((fetched, -factor))
        return found

    def cover(self, values: Sequence[float]) -> list[float] | None:
        """Factors of the row, ≥ 1, that a relaxed solution breaks by most; None where none is broken."""
        away = np.array(
            [
                values[left] - (values[fetched] if fetched is not None else 0.0)
                for left, fetched in zip(self.left, self.fetched, strict=True)
            ]
        )
        shares = np.array(self.shares)
        worst, found = BROKEN, None
        for order in (-away, -away - BROKEN * shares, -away * shares, -away / shares):
            outside = np.ones(len(shares), dtype=bool)
            short = 1.0
            for one in np.argsort(order, kind="stable").tolist():
                if shares[one] >= short - SHORT:
                    continue
                outside[one], short = False, short - shares[one]
                factors = np.where(outside, np.minimum(shares, short), 0.0) / short
                broken = 1.0 - float(factors @ away)
                if broken > worst:
                    worst, found = broken, factors.tolist()
        return found


@dataclass
class _Program:
    """A mixed-integer program, written row by row."""

    costs: list[float] = field(default_factory=list)
    tops: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def new(self, count: int, top: float = 1.0, *, cost: float = 0.0, whole: bool = False) -> list[int]:
        """Variables between 0 and `top`."""
        first = len(self.costs)
        self.costs += [cost] * count
        self.tops += [top] * count
        self.whole += [whole] * count
        return list(range(first, first + count))

    def row(self, terms: Iterable[tuple[int, float]], low: float = -math.inf, high: float = math.inf) -> None:
        """Low ≤ Σ value · variable ≤ high; each variable is named once."""
        for variable, value in terms:
            self.index.append(variable)
            self.value.append(value)
        self.starts.append(len(self.index))
        self.lows.append(low)
        self.highs.append(high)

    def solver(self, offset: float = 0.0, near: float = 0.0, *, relaxed: bool = False) -> Any:
        """HiGHS with the program."""
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.lows)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.zeros(len(self.costs)), np.array(self.tops)
        model.row_lower_, model.row_upper_ = np.array(self.lows), np.array(self.highs)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self.starts, dtype=np.int32)
        model.a_matrix_.index_ = np.array(self.index, dtype=np.int32)
        model.a_matrix_.value_ = np.array(self.value)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[whole and not relaxed] for whole in self.whole]
        model.offset_ = offset
        solver = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("mip_rel_gap", near),
            ("mip_abs_gap", 0.0),
        ):
            solver.setOptionValue(option, value)
        solver.passModel(model)
        return solver


class Exact:
    """The program of a problem with one space, without updates on the host."""

    def __init__(self, problem: Problem) -> None:
        if len(problem.spaces) != 1 or problem.updates:
            raise ValueError(f"one space and no updates are asked for, not {len(problem.spaces)} of them")
        self.problem = problem
        self._n = n = problem.nodes
        self._gaps = gaps_of(problem)
        self._trace = trace = _Program()
        self._unit = (problem.starts[-1] - problem.starts[0]) or 1.0
        took = np.diff(problem.starts) / self._unit
        self._took: list[float] = np.where(took < SHORT, 0.0, took).tolist()
        excess = {
            k: live - problem.budget for k, live in enumerate(problem.profile()) if live > problem.budget
        }
        self._useful: dict[int, _Gap] = {}
        for row in range(len(self._gaps)):
            after, used = int(self._gaps.after[row]), int(self._gaps.used[row])
            over = [k for k in range(after, used) if k % n in excess]
            if over:
                left, fetched = (trace.new(len(over), whole=True) for _ in range(2))
                seconds = float(self._gaps.back[0, row]) / self._unit
                self._useful[row] = _Gap(row, seconds, over, left, fetched)
        copies = sum(
            gap.seconds_back + float(self._gaps.out[0, row]) / self._unit for row, gap in self._useful.items()
        )
        # All copies in a row are never too few.
        self._out, self._back = (trace.new(n, copies, cost=1.0) for _ in range(2))
        for gap in self._useful.values():
            self._whole(gap)
        self._asked = self._memory(excess)
        self._stores()
        self._fetches()
        self._cover()

    def solve(
        self,
        seconds: float,
        known: Iterable[Move] | None = None,
        near: float = 1e-3,
        below: float = math.inf,
    ) -> Proved:
        """In about this time of a processor, or until bound and solution are `near`.

        `known`: a plan's moves, to begin with. `below`: only steps of fewer seconds are sought, and where there are
        none, that is the bound.
        """
        base = self._unit
        solver = self._trace.solver(sum(self._took), near)
        if below < math.inf:
            waits = [*self._out, *self._back]
            most = below / base - sum(self._took)
            solver.addRow(-math.inf, most, len(waits), np.array(waits, dtype=np.int32), np.ones(len(waits)))
        if known is not None:
            self._begin(solver, list(known))
        until = time.process_time() + seconds

        def stop(event: Any) -> None:
            event.interrupt(time.process_time() > until)

        solver.cbMipInterrupt.subscribe(stop)
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return Proved(below, math.inf, True)
        info = solver.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return Proved(
            max(1.0, min(info.mip_dual_bound, below / base)) * base,
            info.objective_function_value * base if found else math.inf,
            solver.getModelStatus() == highspy.HighsModelStatus.kOptimal,
        )

    def _begin(self, solver: Any, moves: list[Move]) -> None:
        """Tell the solver where a plan's moves lie."""
        places = {(move.storage, move.gap): move for move in moves}
        index, value = [], []
        for row, gap in self._useful.items():
            move = places.get((int(self._gaps.storage[row]), int(self._gaps.gap[row])))
            for k, left, fetched in zip(gap.over, gap.left, gap.fetched, strict=True):
                index += [left, fetched]
                gone = move is not None and any(move.leave <= one < move.fetch for one in gap.over)
                behind = [one for one in gap.over if move is not None and one >= move.fetch]
                last = gap.over[gap.over.index(behind[0]) - 1] if behind and gone else gap.over[-1]
                value += [float(gone and move is not None and move.leave <= k), float(gone and k >= last)]
        solver.setSolution(len(index), np.array(index, dtype=np.int32), np.array(value))

    def _whole(self, gap: _Gap) -> None:
        """Nothing comes before it goes, and what has gone comes."""
        row = self._trace.row
        for one in (gap.left, gap.fetched):
            for before, after in pairwise(one):
                row([(after, 1.0), (before, -1.0)], low=0.0)
        for left, fetched in zip(gap.left[:-1], gap.fetched[:-1], strict=True):
            row([(left, 1.0), (fetched, -1.0)], low=0.0)
        row([(gap.left[-1], 1.0), (gap.fetched[-1], -1.0)], low=0.0, high=0.0)

    def _memory(self, excess: dict[int, int]) -> list[Asked]:
        asked = {k: Asked() for k in excess}
        for row, gap in self._useful.items():
            count = int(self._gaps.bytes[row])
            for at, k in enumerate(gap.over):
                one = asked[k % self._n]
                one.left.append(gap.left[at])
                one.fetched.append(gap.fetched[at - 1] if at else None)
                # More than is asked for is of no use.
                one.shares.append(min(1.0, count / excess[k % self._n]))
        for one in asked.values():
            self._trace.row(one.terms(one.shares), low=1.0)
        return list(asked.values())

    def _cover(self) -> None:
        """Add what the relaxed program breaks."""
        solver = self._trace.solver(relaxed=True)
        for _ in range(ROUNDS):
            solver.run()
            values = solver.getSolution().col_value
            if not values:
                return
            rows = [one.terms(factors) for one in self._asked if (factors := one.cover(values)) is not None]
            for terms in rows:
                self._trace.row(terms, low=1.0)
                index, value = zip(*terms, strict=True)
                solver.addRow(1.0, math.inf, len(terms), np.array(index, dtype=np.int32), np.array(value))
            if not rows:
                return

    def _stores(self) -> None:
        versions: dict[int, list[tuple[_Gap, int]]] = {}
        for row, gap in self._useful.items():
            if not self._gaps.clean[row]:
                # Of a version that goes around the step's end, places behind it are counted on.
                around = int(self._gaps.open[row]) // self._n * self._n
                versions.setdefault(int(self._gaps.version[row]), []).append((gap, around))
        cuts = set()
        for gaps in versions.values():
            cuts.add(3 * (int(self._gaps.open[gaps[0][0].row]) % self._n) + COMES)
            cuts |= {3 * (k % self._n) + GONE for gap, _ in gaps for k in gap.over}
        slices = self._slices(cuts)
        loads: list[list[tuple[int, float]]] = [[] for _ in slices.bounds]
        for gaps in versions.values():
            opens = int(self._gaps.open[gaps[0][0].row]) % self._n
            last = max(gap.over[-1] - around for gap, around in gaps)
            window = slices.between(3 * opens + COMES, 3 * last + GONE)
            stored = self._trace.new(len(window))
            seconds = float(self._gaps.out[0, gaps[0][0].row]) / self._unit
            for variable, at in zip(stored, window, strict=True):
                loads[at % len(loads)].append((variable, seconds))
            self._trace.row([(variable, 1.0) for variable in stored], high=1.0)
            for gap, around in gaps:
                for k, left in zip(gap.over, gap.left, strict=True):
                    count = len(slices.between(3 * opens + COMES, 3 * (k - around) + GONE))
                    self._trace.row([*((one, 1.0) for one in stored[:count]), (left, -1.0)], low=0.0)
        self._carry(slices, loads)

    def _fetches(self) -> None:
        cuts = set()
        for row, gap in self._useful.items():
            cuts.add(3 * int(self._gaps.first_use[row]) + BEGINS)
            cuts |= {3 * ((k + 1) % self._n) + GONE for k in gap.over}
        slices = self._slices(cuts)
        loads: list[list[tuple[int, float]]] = [[] for _ in slices.bounds]
        for row, gap in self._useful.items():
            used = int(self._gaps.used[row])
            first = 3 * (gap.over[0] + 1) + GONE
            window = slices.between(first, 3 * used + BEGINS)
            carried = self._trace.new(len(window))
            for variable, at in zip(carried, window, strict=True):
                loads[at % len(loads)].append((variable, gap.seconds_back))
            ends = [len(slices.between(first, 3 * (k + 1) + GONE)) for k in gap.over[1:]]
            for count, fetched in zip([*ends, len(window)], gap.fetched, strict=True):
                terms = [(one, 1.0) for one in carried[:count]]
                self._trace.row([*terms, (fetched, -1.0)], high=0.0)
            self._trace.row([*((one, 1.0) for one in carried), (gap.fetched[-1], -1.0)], low=0.0, high=0.0)
        self._carry(slices, loads)

    def _slices(self, cuts: set[int]) -> _Slices:
        return _Slices(sorted(cuts), 3 * self._n)

    def _carry(self, slices: _Slices, loads: list[list[tuple[int, float]]]) -> None:
        """A link is given no more in each slice than there is time for."""
        bounds = slices.bounds
        for at, load in enumerate(loads):
            last = bounds[at + 1] if at + 1 < len(bounds) else bounds[0] + slices.size
            terms, length = list(load), 0.0
            for moment in range(bounds[at], last):
                place, which = divmod(moment % slices.size, 3)
                if which == COMES:
                    terms.append((self._out[place], -1.0))
                elif which == GONE:
                    terms.append((self._back[place], -1.0))
                else:
                    length += self._took[place]
            self._trace.row(terms, high=length)


@dataclass(frozen=True)
class _Slices:
    """A link's time, cut at moments (3 · place + which of its three), which go on in the next step."""

    bounds: list[int]
    """Slice t begins at bounds[t]."""
    size: int
    """Moments of a step."""

    def between(self, first: int, last: int) -> range:
        """Slices from one cut to another that is not before it, counted on from those of the first's step."""
        return range(self._at(first), self._at(last))

    def _at(self, moment: int) -> int:
        turn, moment = divmod(moment, self.size)
        return turn * len(self.bounds) + bisect_left(self.bounds, moment)
