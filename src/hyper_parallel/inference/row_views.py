"""Views of the rows of many requests in one call: PyTorch's split, with the gaps between them as parts of their own.

A slice for each request and layer costs a few microseconds of Python each; one split of the whole store costs a tenth,
and its sizes are the same for all layers of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class RowViews:
    """Slices of the rows of a tensor, None for those that no view can give. Of slices that overlap, the second is given
    none either."""

    def __init__(self, slices: Sequence[slice | None]) -> None:
        self._places: list[int | None] = [None] * len(slices)
        """The part of the split that each is."""
        self._sizes: list[int] = []
        self._end = 0
        known = [(rows.start, rows.stop, place) for place, rows in enumerate(slices) if rows is not None]
        for start, stop, place in sorted(known):
            if start < self._end:
                continue
            self._places[place] = len(self._sizes) + 1
            self._sizes += [start - self._end, stop - start]
            self._end = stop

    def of(self, x: Tensor, dim: int) -> list[Tensor | None]:
        """The views, of a tensor whose rows are its dimension `dim`."""
        parts = x.split_with_sizes([*self._sizes, x.size(dim) - self._end], dim)
        return [None if place is None else parts[place] for place in self._places]
