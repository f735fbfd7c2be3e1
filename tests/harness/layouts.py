"""Layouts to begin with, for tests of what changes them."""

import numpy as np

from hyper_parallel.offloading.chosen import Chosen
from hyper_parallel.offloading.floor import farthest
from hyper_parallel.offloading.gaps import gaps_of
from hyper_parallel.offloading.layout import Layout
from hyper_parallel.offloading.problem import Problem


def everything_away(problem: Problem) -> Layout:
    """All gaps, for as long as they can be: within the budget, and slow."""
    gaps = gaps_of(problem)
    chosen = Chosen(problem, gaps)
    for row in range(len(gaps)):
        chosen.add(row)
    return farthest(gaps, np.array(problem.profile()), problem.budget, chosen)
