"""Lower bound on step time under a budget, by a linear program that every plan satisfies.

Time is cut at chosen places c. Of each storage that is idle in a gap, the program may move any *fraction*:

    live bytes at c − Σ bytes · fraction away at c  ≤  budget
    Σ over a slice of time of the fractions a link carries · their seconds  ≤  the slice's seconds + its stall
    what is away was stored since it was last written, and is fetched before it is used     (`relaxation`, in full)

and the least budget is sought with every stall 0 (`zero_stall_budget`), or the least Σ stall under the budget
(`least_seconds`).

**Why it is a bound.** Take any plan whose step repeats, with any order of copies on a link that carries one at a time.
Let "stored" and "fetched" be the fractions of each copy that its link has carried by a time. A store begins behind the
last write before its gap, perhaps long before the gap, and is over where its storage leaves, so that all of it is
stored by each place at which the storage is away. A fetch begins when the host comes to its place, after the last node
at which the storage is away, and is over before the next use. A node never takes less time than `starts` gives it, so
that what lies between the ends of a slice is its base and the stalls in it. So the plan, as it is, meets every row, and
its time is base plus stalls. Everything else is left out, which only lowers the bound: that a whole storage comes and
goes, that memory must be met at places that are not chosen, that a link is first in first out, and where in a slice a
gap begins. The step that counts is the one that repeats: over many steps no link carries more than the time there is.

**Updates on the host.** The program leaves out that their gradients and parameters have to be away, and in which order
what concerns them goes: a gradient dies with its last use, and a parameter may come back at once. But each step has to
be as long as all their copies out, all their copies back, and the host's work, each one after the other.

**How it is made small.** Storages whose gaps hold the same places are one variable. They are alike but for latency, of
which each byte is charged what the largest of them pays. Small ones, together less than `SMALL` of the peak, are taken
to be away whenever they are idle, at no cost.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hyper_parallel.offloading.schedule.lp_relaxation import Relaxation
from hyper_parallel.offloading.schedule.problem import Problem

PLACES = 128
"""Places at which memory is asked for, where a step has more nodes. More make the bound higher and slower."""


def zero_stall_budget(problem: Problem, *, places: int = PLACES, seconds: float = 60.0) -> int:
    """Bytes below which every plan makes the step wait for copies, whatever `problem.budget` is.

    `places`: how many places memory is asked for at. `seconds`: after how long the solver is asked for what it has.
    Raises SolverError without HiGHS (`pip install 'hyper-parallel[bounds]'`).
    """
    problem = _without_updates(problem)
    peak, least = max(problem.profile(), default=0), problem.working_set
    if least == peak or not problem.spaces:
        return peak
    relaxation = Relaxation(problem, least, places, stalls=False)
    # Beyond the working set, as a share of the peak.
    more = relaxation.linear.new(1, 1 - least / peak, cost=1.0)
    relaxation.linear.add(relaxation.memory, more, 1.0)
    return least + max(0, math.ceil(relaxation.linear.least(seconds) * peak))


def least_seconds(problem: Problem, *, places: int = PLACES, seconds: float = 60.0) -> float:
    """Seconds of a step that no plan within `problem.budget` goes below; infinity where there is no such plan.

    `places`, `seconds` and what is raised are as of `zero_stall_budget`.
    """
    host = _of_updates(problem)
    problem = _without_updates(problem)
    if max(problem.profile(), default=0) <= problem.budget:
        return max(problem.seconds, host)
    if problem.budget < problem.working_set or not problem.spaces:
        return math.inf
    relaxation = Relaxation(problem, problem.budget, places, stalls=True)
    return max(host, problem.seconds + max(0.0, relaxation.linear.least(seconds)) * relaxation.unit)


def _without_updates(problem: Problem) -> Problem:
    held = tuple(replace(one, must=None) if one.must is not None else one for one in problem.held)
    return replace(problem, held=held, updates=())


def _of_updates(problem: Problem) -> float:
    """Seconds of a step below which its updates on the host do not go."""
    spaces = {space.name: space for space in problem.spaces}
    out = back = host = 0.0
    for update in problem.updates:
        gradient, parameter = (problem.by_storage[one] for one in (update.gradient, update.parameter))
        assert gradient.must is not None
        space = spaces[gradient.must.space]
        out += space.out.seconds(gradient.bytes)
        back += space.back.seconds(parameter.bytes)
        host += update.seconds
    return max(out, back, host)
