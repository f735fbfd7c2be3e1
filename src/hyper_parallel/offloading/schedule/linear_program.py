"""Linear programs, with a lower bound that holds however inexact the solver is.

    minimise  c·v    where  low ≤ A·v ≤ high  and  0 ≤ v ≤ top

For *any* prices y of the rows, each row's product taken at the side that the sign of its price allows,

    c·v  ≥  Σ_rows min over the row's sides of y·side  +  Σ_v min(0, c − Aᵀy) · top               `Linear.least`

since every v lies between 0 and its top (weak duality in a box: Neumaier and Shcherbina, "Safe bounds in linear and
mixed-integer linear programming", Math. Program. 99, 2004). The solver, HiGHS, only proposes y; tolerances, an early
end and coefficients that it drops make the bound lower, and never wrong.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.offloading.schedule.idle_intervals import Floats, Ints


class SolverError(HyperParallelError):
    """A bound was asked for where the solver is not installed, or the solver gave up."""


class Linear:
    """A linear program that is written down in blocks."""

    def __init__(self) -> None:
        self._tops: list[Floats] = []
        self._costs: list[Floats] = []
        self._lows: list[Floats] = []
        self._highs: list[Floats] = []
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self.variables = 0
        self.rows = 0

    def new(self, count: int, top: float = 1.0, cost: float = 0.0) -> Ints:
        """Numbers of `count` variables between 0 and `top`."""
        self._tops.append(np.full(count, float(top)))
        self._costs.append(np.full(count, float(cost)))
        self.variables += count
        return np.arange(self.variables - count, self.variables)

    def where(self, low: Any, high: Any) -> Ints:
        """Numbers of rows that are to lie between `low` and `high`: arrays of one size, or numbers for one row."""
        lows, highs = np.broadcast_arrays(np.atleast_1d(low), np.atleast_1d(high))
        self._lows.append(lows.astype(float))
        self._highs.append(highs.astype(float))
        self.rows += lows.size
        return np.arange(self.rows - lows.size, self.rows)

    def add(self, rows: Any, variables: Any, values: Any) -> None:
        """Add value · variable to rows: arrays that are stretched to one size."""
        where, what, how = np.broadcast_arrays(np.atleast_1d(rows), variables, values)
        if where.size:
            self._entries.append((where.astype(np.int64), what.astype(np.int64), how.astype(float)))

    def least(self, seconds: float) -> float:
        """A lower bound of the optimum, in at most about this time; infinity where nothing meets the rows.

        Raises SolverError where HiGHS is not installed or has no answer at all.
        """
        highs = _highs()
        tops, costs = np.concatenate(self._tops), np.concatenate(self._costs)
        lows, uppers = np.concatenate(self._lows), np.concatenate(self._highs)
        row, column, value = (np.concatenate([entry[part] for entry in self._entries]) for part in range(3))
        order = np.argsort(row, kind="stable")
        row, column, value = row[order], column[order], value[order]
        starts = np.searchsorted(row, np.arange(self.rows + 1)).astype(np.int32)

        model = highs.HighsLp()
        model.num_col_, model.num_row_ = self.variables, self.rows
        model.col_cost_, model.col_lower_, model.col_upper_ = costs, np.zeros(self.variables), tops
        model.row_lower_, model.row_upper_ = lows, uppers
        model.a_matrix_.format_ = highs.MatrixFormat.kRowwise
        model.a_matrix_.start_, model.a_matrix_.index_ = starts, column.astype(np.int32)
        model.a_matrix_.value_ = value
        solver = highs.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", seconds)
        if self.variables > LARGE:
            # What a vertex is, nobody asks: prices from inside do as well, and come sooner.
            solver.setOptionValue("solver", "ipm")
            solver.setOptionValue("run_crossover", "off")
        solver.passModel(model)
        solver.run()
        status = solver.getModelStatus()
        if status == highs.HighsModelStatus.kInfeasible:
            return math.inf
        prices = np.array(solver.getSolution().row_dual)
        if prices.size != self.rows:
            said = solver.modelStatusToString(status)
            raise SolverError(f"HiGHS has no answer to {self.variables:,} variables in {seconds:g} s: {said}")

        prices = np.where(np.isfinite(np.where(prices > 0, lows, uppers)), prices, 0.0)
        sides = prices * np.nan_to_num(np.where(prices > 0, lows, uppers), posinf=0.0, neginf=0.0)
        left = costs - np.bincount(column, weights=value * prices[row], minlength=self.variables)
        parts = np.concatenate([sides, np.minimum(left, 0.0) * tops])
        # Of the sums' own rounding.
        slack = (
            4 * np.finfo(float).eps * (np.abs(value * prices[row] * tops[column]).sum() + np.abs(parts).sum())
        )
        return float(math.fsum(parts) - slack)


LARGE = 20_000
"""Variables from which on the interior point method is quicker than the simplex method."""


def _highs() -> Any:
    try:
        import highspy
    except ImportError:
        raise SolverError(
            "lower bounds are found with HiGHS, which is not installed; "
            "install it with: pip install 'hyper-parallel[bounds]'"
        ) from None
    return highspy
