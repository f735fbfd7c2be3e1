"""Strategies as columns of numbers: a row is a strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Columns = dict[str, Array]
Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


def taken(rows: Columns, index: Any) -> Columns:
    """The rows of an index."""
    return {name: column[index] for name, column in rows.items()}


def unique(columns: Columns) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The first row of each kind of equal rows, and the kind of each row.

    Columns are whole numbers, so kinds are found by counting instead of sorting: there may be a million rows.
    """
    keys = np.zeros(next(iter(columns.values())).size, dtype=np.intp)
    size = 1
    for column in columns.values():
        kinds, many = _ranked(column.astype(np.intp))
        keys, size = keys * many + kinds, size * many
        if size > keys.size:
            keys, size = _ranked(keys)
    keys, size = _ranked(keys)
    first = np.empty(size, dtype=np.intp)
    first[keys[::-1]] = np.arange(keys.size)[::-1]
    return first, keys


def _ranked(numbers: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], int]:
    """For each number how many different ones are below it, and how many there are."""
    seen = np.zeros(int(numbers.max(initial=0)) + 1, dtype=np.bool_)
    seen[numbers] = True
    rank = np.cumsum(seen) - 1
    return rank[numbers], int(rank[-1]) + 1 if numbers.size else 0


def full_like(rows: Columns, **values: float) -> Columns:
    """Columns that have one value for all rows."""
    n = next(iter(rows.values())).size
    return {name: np.full(n, value) for name, value in values.items()}
