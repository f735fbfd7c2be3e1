"""Rows of a step for data ranks that must have as much in every micro-batch: alike ones together, and copies.

Submodels on devices of their own compute graphs of fixed sizes, so that the data ranks of a part take rows with as many
images, of the same sizes. What has no partner is computed once more, by a rank whose copy bears no loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def with_partners(
    rows: Sequence[T], amount: Callable[[T], Any], ranks: int, size: int
) -> list[tuple[T, bool]]:
    """Rows and whether they bear loss, in the order in which micro-batches of `size` rows are cut from them: those with
    most first, and every `ranks` of them, which divide `size`, with the same `amount`."""
    found: list[tuple[T, bool]] = []
    for _, alike in itertools.groupby(sorted(rows, key=amount, reverse=True), key=amount):
        found += [(row, True) for row in alike]
        found += [(found[-1][0], False)] * (-len(found) % ranks)
    return found + [(found[-1][0], False)] * (-len(found) % size)
