"""Device efficiency: the fraction of peak FLOP/s that a kernel reaches, by its shape.

Matrix products, [m, k] · [k, n] in a batch:

    share(batch, m, n, k) = best / ((1 + h_m/m) (1 + h_n/n) (1 + h_k/k)) · c(batch, m, n, k)     `ShapeTable.share`

h are lengths at which half of the best is reached (Hockney's n_½; Hockney and Jesshope, *Parallel Computers 2*, 1988,
section 1.3.2). c is the correction by measured points: at a point the ratio of the measured share to the smooth one,
and between points the mean of the logarithms of these ratios, weighted by the inverse of the distance in log₂ of the
shape to the fourth power (Shepard, ACM 1968); far from all points it fades to 1. So the table is exact at its points,
and nowhere above the best of them. A table without points is a curve, and its share does not depend on the batch.

Attention is the same in (batch · heads, queries, keys, size); its FLOPs are those of its matrix products,

    4 · batch · heads · queries · keys · size       forward                     `attention_flops`
    10 · …                                          backward, which computes the scores again
    half of them if the kernel skips masked scores

Bytes: a share of the memory bandwidth by the bytes moved, above 1 within caches (`MemoryTable`), for each kind of
operator and, if measured, for single operators by name.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field

from hyper_parallel.workload.work import Work

# A measured quantity as a function of a size: piecewise linear in the logarithms of both.
#
#     log y = log y_i + (log x − log x_i) · (log y_{i+1} − log y_i) / (log x_{i+1} − log x_i)      `Curve.at`
#
# Beyond the first and the last point the curve is constant. So it is exact at the points, lies between its neighbours
# everywhere else, and rises where the points rise.


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


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


_FADE = 4.0**-4
"""Weight of the smooth curve: that of a measured point four doublings away."""


@dataclass(frozen=True)
class ShapeTable:
    """Shares of the peak that matrix products, or attention, reach in one dtype and layout."""

    dtype: str = ""
    """Empty: all dtypes without their own table."""
    layout: str = ""
    """Empty: all layouts without their own table."""
    best: Positive = 1.0
    """The share that large shapes reach."""
    half: tuple[NotNegative, NotNegative, NotNegative] = (0.0, 0.0, 0.0)
    """Sizes of the three dims at which half of the best is reached."""
    points: tuple[tuple[Positive, Positive, Positive, Positive, Positive], ...] = ()
    """Measured points: batch, the three dims, share of the peak."""
    spread: float | None = None
    """Spread of the measured times: the mean of (third quartile − first) / median."""
    residual: float | None = None
    """Error on shapes between the points: the mean of |predicted / measured − 1|."""

    def smooth(self, dims: Sequence[float]) -> float:
        """The share without the measured points; `dims` are the last three."""
        share = self.best
        for size, half in zip(dims, self.half, strict=True):
            share /= 1 + half / max(size, 1)
        return share

    def share(self, shape: Sequence[float]) -> float:
        """The share of the peak at (batch, three dims)."""
        smooth = self.smooth(shape[1:])
        if not self.points:
            return smooth
        where = [math.log2(max(size, 1)) for size in shape]
        total, weights = 0.0, _FADE
        for place, ratio in self._ratios:
            distance = sum((a - b) ** 2 for a, b in zip(where, place, strict=True))
            if distance < 1e-12:
                return smooth * math.exp(ratio)
            total += ratio / distance**2
            weights += 1 / distance**2
        return min(self._most, smooth * math.exp(total / weights))

    @cached_property
    def _most(self) -> float:
        """The best of the points; beyond them the smooth curve would give more."""
        return max(share for *_, share in self.points)

    @cached_property
    def _ratios(self) -> tuple[tuple[tuple[float, ...], float], ...]:
        """The log₂ shape of each point, and the log of its measured over its smooth share."""
        return tuple(
            (
                tuple(math.log2(max(size, 1)) for size in shape),
                math.log(share / self.smooth(shape[1:])),
            )
            for *shape, share in self.points
        )


@dataclass(frozen=True)
class MemoryTable:
    """Shares of the memory bandwidth by the bytes moved, for a kind of operator or a single operator."""

    kind: str = ""
    """A kind of Work; empty: all kinds without their own table."""
    op: str = ""
    """An operator without its overload, such as `aten.silu`; empty: all operators of the kind."""
    dtype: str = ""
    """Empty: all dtypes without their own table."""
    layout: str = ""
    """Empty, `strided`, or `tanh` for the variant of an operator that is computed with tanh."""
    launch: NotNegative | None = None
    """Launch seconds of a call that moves next to no bytes; None: the device's."""
    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """Bytes read and written, share of the bandwidth."""
    spread: float | None = None
    """As `ShapeTable.spread`."""

    def __post_init__(self) -> None:
        Curve(self.points)  # raises for invalid points

    @cached_property
    def curve(self) -> Curve:
        """Share by bytes."""
        return Curve(self.points)


@dataclass(frozen=True)
class Efficiency:
    """All efficiency tables of a device."""

    matmul: tuple[ShapeTable, ...] = ()
    attention: tuple[ShapeTable, ...] = ()
    memory: tuple[MemoryTable, ...] = ()
    fresh: tuple[tuple[float, float], ...] = ()
    """Bytes in newly allocated memory, and the bandwidth share of the first touch, in addition to the write itself.
    Empty if the first touch costs nothing.
    """

    def matmul_share(self, work: Work) -> float:
        """The share of the peak that a matrix product reaches."""
        table = _best_of(self.matmul, work.dtype, work.layout)
        if table is None:
            return 1.0
        return table.share(work.shape) if len(work.shape) == 4 else table.best

    def attention_rate(self, work: Work) -> tuple[float, float]:
        """The FLOPs of an attention kernel, and the share of the peak that it reaches."""
        layout = work.layout or ("backward" if "backward" in work.op else "forward")
        table = _best_of(self.attention, work.dtype, layout)
        if len(work.shape) != 5:
            return work.flops, table.best if table else 1.0
        batch, heads, queries, keys, size = work.shape
        flops = attention_flops(work.shape, layout)
        return flops, table.share((batch * heads, queries, keys, size)) if table else 1.0

    def memory_of(self, work: Work) -> MemoryTable | None:
        """The table that prices an operator's bytes; None if its kind has none."""
        key = (work.op, work.kind, work.dtype, work.layout)
        if key not in self._found:
            self._found[key] = self._memory_of(work)
        return self._found[key]

    def __post_init__(self) -> None:
        if self.fresh:
            Curve(self.fresh)  # raises for invalid points

    def slowed(self, times: float) -> Efficiency:
        """The same tables, with launch times multiplied by `times`."""
        return replace(
            self,
            memory=tuple(
                table if table.launch is None else replace(table, launch=table.launch * times)
                for table in self.memory
            ),
        )

    @cached_property
    def _found(self) -> dict[tuple[str, str, str, str], MemoryTable | None]:
        return {}

    def _memory_of(self, work: Work) -> MemoryTable | None:
        name = ".".join(work.op.split(".")[:2])
        named = [table for table in self.memory if table.op and table.op == name]
        kinds = [table for table in self.memory if not table.op and table.kind == work.kind]
        kinds = kinds or [table for table in self.memory if not table.op and not table.kind]
        # A table by name is more specific than one by kind, and a strided layout more than the name.
        for layout in (work.layout, "") if work.layout != "strided" else (work.layout,):
            for tables in (named, kinds):
                for table in _by_closeness(tables, work.dtype):
                    if table.layout == layout:
                        return table
        found = [*_by_closeness(named, work.dtype), *_by_closeness(kinds, work.dtype)]
        return found[0] if found else None

    @cached_property
    def fresh_curve(self) -> Curve | None:
        """Share by bytes of newly allocated memory; None if its first touch costs nothing."""
        return Curve(self.fresh) if self.fresh else None


def attention_flops(shape: Sequence[int], layout: str) -> float:
    """FLOPs of the matrix products of attention of shape (batch, heads, queries, keys, size).

    >>> attention_flops((1, 1, 2, 2, 4), "forward")
    64.0
    """
    batch, heads, queries, keys, size = shape
    products = 10.0 if layout.startswith("backward") else 4.0
    skipped = 0.5 if layout.endswith("causal") else 1.0
    return products * batch * heads * queries * keys * size * skipped


def _best_of(tables: Sequence[ShapeTable], dtype: str, layout: str) -> ShapeTable | None:
    """The table of this dtype and layout, else a table for all dtypes or layouts, else None."""
    for wanted in ((dtype, layout), (dtype, ""), ("", layout), ("", "")):
        for table in tables:
            if (table.dtype, table.layout) == wanted:
                return table
    # A layout that was not measured runs like another of its dtype rather than at the peak.
    return next((table for table in tables if table.dtype == dtype), None)


def _by_closeness(tables: Sequence[MemoryTable], dtype: str) -> list[MemoryTable]:
    """Tables of the dtype first, then those for all dtypes, then those of other dtypes."""
    return sorted(tables, key=lambda table: 0 if table.dtype == dtype else 1 if not table.dtype else 2)
