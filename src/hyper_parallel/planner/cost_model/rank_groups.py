"""Rank groups: the ranks of each axis, by the order of axes on the machine.

An axis' neighbouring ranks have the product of the degrees of all axes inside it between them (`table.ORDERS`). The
`expert` axis folds over the inner ones from the inside, outside of `expert_tensor`; an expert's gradients are reduced
over what of data, context and tensor is left, the ranks of both apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.codes import ORDERS
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.collectives import RankGroup
from hyper_parallel.planner.table import Array, Table


@dataclass(frozen=True)
class Ranks:
    """The groups that a configuration's collectives run over."""

    t: Table
    k: Constants

    @cached_property
    def tensor(self) -> Array:
        """Ranks that split each matrix."""
        return self.t.tensor_x * self.t.tensor_y

    @cached_property
    def data(self) -> Array:
        """Ranks that see other rows."""
        return self.t.replicate * self.t.shard

    @cached_property
    def same(self) -> Array:
        """Ranks that hold, or share, the same parameters and see other tokens: data and context."""
        return self.data * self.t.context

    @cached_property
    def x(self) -> RankGroup:
        """The first tensor axis."""
        return self._group(self.t.tensor_x, "tensor_x")

    @cached_property
    def y(self) -> RankGroup:
        """The second tensor axis."""
        return self._group(self.t.tensor_y, "tensor_y")

    @cached_property
    def context(self) -> RankGroup:
        """Ranks that split positions."""
        return self._group(self.t.context, "context")

    @cached_property
    def stages(self) -> RankGroup:
        """The pipeline's stages."""
        return self._group(self.t.pipeline, "pipeline")

    @cached_property
    def experts(self) -> RankGroup:
        """Ranks over which experts are spread; those that split one expert's features lie between them."""
        return RankGroup.of(self.t, self.k, self.t.expert, self.t.expert_tensor)

    @cached_property
    def expert_tensor(self) -> RankGroup:
        """Ranks that split the features of each expert."""
        return RankGroup.of(self.t, self.k, self.t.expert_tensor, np.ones(1))

    @cached_property
    def of_experts(self) -> Array:
        """Ranks that hold one copy of a layer's experts together."""
        return self.t.expert * self.t.expert_tensor

    @cached_property
    def reducing(self) -> RankGroup:
        """Ranks that reduce the same gradients, experts' apart: data and context, from the inner one outwards."""
        return RankGroup.of(self.t, self.k, self.same, self._before_tokens)

    @cached_property
    def reducing_experts(self) -> RankGroup:
        """Ranks that reduce the same experts' gradients."""
        ranks = np.maximum(self.same * self.tensor / self.of_experts, 1.0)
        return RankGroup.of(self.t, self.k, ranks, self.of_experts)

    @cached_property
    def gathering(self) -> RankGroup:
        """Ranks that share one copy of the parameters: `shard` and `context`."""
        return RankGroup.of(self.t, self.k, self.t.shard * self.t.context, self._before_tokens)

    @cached_property
    def copies(self) -> RankGroup:
        """Ranks that hold the same part of the parameters: `replicate`, outside of `shard` and `context`."""
        return RankGroup.of(
            self.t, self.k, self.t.replicate, self._before_tokens * self.t.shard * self.t.context
        )

    def _group(self, ranks: Array, axis: str) -> RankGroup:
        return RankGroup.of(self.t, self.k, ranks, self._inside(axis))

    @cached_property
    def _before_tokens(self) -> Array:
        """Ranks between neighbours of the inner one of data and context."""
        return np.minimum(self._inside("context"), self._inside("data"))

    @cached_property
    def _orders(self) -> list[tuple[tuple[str, ...], npt.NDArray[np.bool_]]]:
        """The orders that rows have, and which rows have each."""
        codes = np.flatnonzero(np.bincount(self.t.order.astype(np.intp)))
        return [(ORDERS[code], self.t.order == code) for code in codes]

    def _inside(self, axis: str) -> Array:
        """Ranks between neighbours of an axis: the product of the axes inside it."""
        degrees = {
            "tensor_x": self.t.tensor_x,
            "tensor_y": self.t.tensor_y,
            "context": self.t.context,
            "data": self.data,
            "pipeline": self.t.pipeline,
        }
        found: Array = np.ones(1)
        for order, rows in self._orders:
            inside: Array = np.ones(1)
            for other in order[: order.index(axis)]:
                inside = inside * degrees[other]
            found = inside if len(self._orders) == 1 else np.where(rows, inside, found)
        return found
