"""Closed-form memory bounds over recomputation and offload choices.

A rank has F fixed bytes, O of optimizer state and A of activations. With the share s of the state and the share a of
the activations on the host, and with the share w of its layers recomputed, which saves w E bytes of activations,

    device   F + (1 - s) O + (1 - p) P + (1 - a) (A - w E) ≤ (capacity - outside) / slack
    host     s O + p P + a (A - w E) ≤ host                        (`cost_model.memory`, which is linear in each share)

P are parameters and gradients, of which the share p lies on the host.

Solved for w, these give the least w of each rank; the group needs the largest of them (`Room.least`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Share = Array | float
Stages = list[dict[str, Array]]
"""Bytes by kind of a rank of each stage."""
ROUNDING = 1e-10
"""Of a limit: how far this sum and the model's, which adds in another order, may be apart."""


@dataclass(frozen=True)
class Room:
    """Bytes of the ranks that may be the fullest; columns are [ranks, n]."""

    fixed: Array
    state: Array
    weights: Array
    activations: Array
    fewer: Array
    """Activations that are not kept where all layers are computed again; zeros where how many is given."""

    @classmethod
    def of(cls, kept: Stages, again: Stages | None = None) -> Room:
        """Of what `cost_model.memory.by_stage` says of rows with nothing on the host.

        `again`: the same with all layers computed again, where any number may be.

        The fixed bytes are those of `again`: what a layer that is computed again needs does not depend on how many are.
        """
        last = again if again is not None else kept
        n = max(column.size for stage in (*kept, *last) for column in stage.values())

        def column(stages: Stages, *kinds: str) -> Array:
            return np.stack([sum((stage[kind] for kind in kinds), np.zeros(n)) for stage in stages])

        activations = column(kept, "activations")
        moving = ("optimizer", "parameters", "gradients", "activations")
        return cls(
            column(last, *(kind for kind in kept[0] if kind not in moving)),
            column(kept, "optimizer"),
            column(kept, "parameters", "gradients"),
            activations,
            activations - column(last, "activations"),
        )

    def take(self, index: Any) -> Room:
        """The rows of an index."""
        return Room(*(getattr(self, name)[:, index] for name in self.__dataclass_fields__))

    def peak(self, state: Share, weights: Share, moved: Share, share: Share = 0.0) -> Array:
        """Bytes of the fullest rank's device, with shares on the host and of layers computed again. [n]"""
        left = self.activations - share * self.fewer
        kept = (1 - state) * self.state + (1 - weights) * self.weights
        peak: Array = np.max(self.fixed + kept + (1 - moved) * left, axis=0)
        return peak

    def elsewhere(self, state: Share, weights: Share, moved: Share, share: Share = 0.0) -> Array:
        """Bytes on the host of the rank with most of them. [n]"""
        left = self.activations - share * self.fewer
        found: Array = np.max(state * self.state + weights * self.weights + moved * left, axis=0)
        return found

    def floor(self, state: Share, weights: Share, moved: Share, host: float, share: float = 0.0) -> Array:
        """Bytes of the fullest rank at least, with no more than these shares, and `host` bytes, on the host. [n]

        A byte on the host is one less on the device, so that the most there are what is left.
        """
        left = self.activations - share * self.fewer
        gone = np.minimum(state * self.state + weights * self.weights + moved * left, host)
        floor: Array = np.max(self.fixed + self.state + self.weights + left - gone, axis=0)
        return floor

    def least(self, state: Array, weights: Array, moved: Array, device: float, host: float) -> Array:
        """The least share of layers that has to be computed again to fit, with each set of shares; inf: more than all.

        [n, sets]
        """
        state, weights, moved = state[:, None, None], weights[:, None, None], moved[:, None, None]
        kept = self.fixed + (1 - state) * self.state + (1 - weights) * self.weights
        least = _share(kept + (1 - moved) * self.activations - device, (1 - moved) * self.fewer)
        over = state * self.state + weights * self.weights + moved * self.activations - host
        found: Array = np.maximum(least, _share(over, moved * self.fewer)).T
        return found

    def again(self, state: Share, weights: Share, moved: Share, device: float, host: float) -> Array:
        """Share of layers at least that have to be computed again with no more than these shares on the host. [n]

        Below the floor's two sides: all shares moved, and all of the host in use.
        """
        left = self.fixed + (1 - state) * self.state + (1 - weights) * self.weights
        left = left + (1 - moved) * self.activations
        kept = self.fixed + self.state + self.weights + self.activations
        return np.maximum(
            _share(left - device, (1 - moved) * self.fewer), _share(kept - device - host, self.fewer)
        )


def _share(over: Array, fewer: Array) -> Array:
    """How much of `fewer` the rank with most needs, not to be `over`. [..., ranks, n] to [..., n]"""
    needed = np.where(over > 0, np.inf, 0.0)
    share: Array = np.max(np.divide(over, fewer, out=needed, where=(over > 0) & (fewer > 0)), axis=-2)
    return np.where(share > 1, np.inf, share)
