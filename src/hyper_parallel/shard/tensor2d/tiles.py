"""Moves of a tensor of which several dims are split at once, by the parts of one joint of axes.

One collective over the joint and one permutation of its chunks, where moving axis by axis would take one of each for
every part. Chunks arrive in order of rank, which need not be the order of the joint's index: the permutation
that puts them in their places takes both into account.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hyper_parallel.shard.axis import Axis

Part = tuple[str, int]
"""(axis or fold, the dim that it splits)."""


@dataclass(frozen=True)
class Tiles:
    """The dims of a tensor that a joint splits, part by part; every part divides its dim."""

    axis: Axis
    parts: tuple[Part, ...]
    """Outer to inner, as the joint names them; only those of degree above 1."""

    @classmethod
    def of(cls, parts: Sequence[Part], axes: Mapping[str, Axis]) -> Tiles:
        """The tiles that `parts` make, the outermost first."""
        live = tuple((name, dim) for name, dim in parts if axes[name].size > 1)
        name = "*".join(name for name, _ in live) or parts[0][0]
        return cls(axes[name], live)

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(self.axis.mesh.size(name) for name, _ in self.parts)

    @functools.cached_property
    def _in_rank_order(self) -> tuple[int, ...]:
        """The positions of the parts such that the group's ranks count through them, the last one fastest."""
        strides = [math.prod(self._sizes[at + 1 :]) for at in range(len(self._sizes))]
        order = self.axis.order or tuple(range(self.axis.size))
        for places in itertools.permutations(range(len(self.parts))):
            counted = itertools.product(*(range(self._sizes[at]) for at in places))
            indices = (
                sum(digit * strides[at] for digit, at in zip(digits, places, strict=True))
                for digits in counted
            )
            if tuple(indices) == order:
                return places
        raise AssertionError(f"the ranks of {self.axis.name} stand in no order of its parts: {order}")

    def _places(self, dims: int) -> list[list[int]]:
        """For each dim the parts that split it, outer to inner."""
        return [[at for at, (_, d) in enumerate(self.parts) if d % dims == dim] for dim in range(dims)]

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        ranked = self._in_rank_order
        shape = list(x.shape)
        whole = self.axis._gather_rows(x).reshape(*(self._sizes[at] for at in ranked), *shape)
        order, lengths = [], []
        for dim, places in enumerate(self._places(x.dim())):
            order += [*(ranked.index(at) for at in places), len(ranked) + dim]
            lengths.append(math.prod(self._sizes[at] for at in places) * shape[dim])
        return whole.permute(order).reshape(lengths)

    def _reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        ranked = self._in_rank_order
        opened: list[int] = []
        at_of: dict[int, int] = {}
        rest: list[int] = []
        for dim, places in enumerate(self._places(x.dim())):
            for at in places:
                at_of[at] = len(opened)
                opened.append(self._sizes[at])
            rest.append(len(opened))
            split = math.prod(self._sizes[at] for at in places)
            assert x.size(dim) % split == 0, f"{x.size(dim)} features or positions over {self.axis.name}"
            opened.append(x.size(dim) // split)
        rows = x.reshape(opened).permute(*(at_of[at] for at in ranked), *rest)
        part = [opened[at] for at in rest]
        return self.axis._reduce_scatter_rows(rows.reshape(self.axis.size * part[0], *part[1:]))

    def gather_sum(self, x: torch.Tensor) -> torch.Tensor:
        """All parts of all dims, for uses that differ between ranks; the gradient is summed and scattered."""
        return self.axis._move(self._gather, self._reduce_scatter, x)

    def reduce_split(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tile of the sum over the joint; the gradient is gathered."""
        return self.axis._move(self._reduce_scatter, self._gather, x)
