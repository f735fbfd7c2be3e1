"""A measured quantity as a function of a size: piecewise linear in the logarithms of both.

    log y = log y_i + (log x − log x_i) · (log y_{i+1} − log y_i) / (log x_{i+1} − log x_i)      `Curve.at`

Beyond the first and the last point the curve is constant. So it is exact at the points, lies between its neighbours
everywhere else, and rises where the points rise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of positive numbers, x ascending. Raises ValueError for others.

    >>> Curve(((1, 1.0), (100, 0.5))).at(100)
    0.5
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [x for x, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError("a curve has at least one point, and its sizes ascend")
        if not all(0 < number < math.inf for point in self.points for number in point):
            raise ValueError("a curve's sizes and values are positive")

    def at(self, x: float) -> float:
        """The value at size `x`."""
        after = bisect_right(self.points, x, key=lambda point: point[0])
        if after == 0:
            return self.points[0][1]
        here, value = self.points[after - 1]
        if after == len(self.points) or x == here:
            return value
        there, following = self.points[after]
        share = math.log(x / here) / math.log(there / here)
        return float(value * (following / value) ** share)
