"""Layouts to begin with, for tests of what changes them."""

import numpy as np

from hyper_parallel.offloading.schedule.idle_intervals import Chosen, gaps_of
from hyper_parallel.offloading.schedule.problem import Problem
from hyper_parallel.offloading.schedule.solve import farthest
from hyper_parallel.offloading.schedule.transfer_layout import Layout


def everything_away(problem: Problem) -> Layout:
    """All gaps, for as long as they can be: within the budget, and slow."""
    gaps = gaps_of(problem)
    chosen = Chosen(problem, gaps)
    for row in range(len(gaps)):
        chosen.add(row)
    return farthest(gaps, np.array(problem.profile()), problem.budget, chosen)
