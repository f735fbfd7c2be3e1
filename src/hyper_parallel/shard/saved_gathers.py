"""Gathered weights and gradient sums saved between micro-batches, as FSDP2 does in eager mode.

| `memory.shard` | gathered weights | gradients |
|---|---|---|
| `parameters` | gathered in each micro-batch | reduced over the shards in each |
| `gradients` | gathered once a step | reduced over the shards in each |
| `optimizer` | gathered once a step | kept whole, reduced in the last |

Over the copies of a shard (`replicate`) gradients are summed in the last micro-batch only, at every level.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy.memory import ShardLevel


class SavedKind(StrEnum):
    """The kinds of tensors that a pass of a micro-batch leaves for later ones."""

    WEIGHT = "weight"
    """A gathered weight."""
    GRADIENT = "gradient"
    """A sum of gradients that is not reduced yet."""
    COUNT = "count"
    """Rows that each expert of a module got (`shard.experts.routing`)."""


class SavedItem(NamedTuple):
    """A saved tensor, and whose it is."""

    kind: SavedKind
    owner: Hashable


class MicroBatchPosition(NamedTuple):
    """Where in its step a micro-batch is, as far as saving is concerned."""

    level: ShardLevel
    last: bool
    """It is the step's last, in which all that was kept is reduced."""


class SavedGathers:
    """Weights and gradients of one model, from a step's first micro-batch to its last."""

    def __init__(self) -> None:
        self._weights: dict[Hashable, Tensor] = {}
        self._gradients: dict[Hashable, Tensor] = {}
        self.position = MicroBatchPosition("parameters", last=True)
        """Of the micro-batch that is being computed."""

    @contextlib.contextmanager
    def micro_batch(self, level: ShardLevel, *, last: bool) -> Iterator[None]:
        """Compute one micro-batch inside; after the `last` one nothing is kept.

        Raises StrategyError when a gradient was kept for the last one, which then did not use its parameter.
        """
        self.position = MicroBatchPosition(level, last)
        left = True
        try:
            yield
            left = last
            if last and self._gradients:
                raise StrategyError(
                    "a parameter had a gradient in an earlier micro-batch of the step and none in the last one, in "
                    "which gradients are reduced; set strategy.memory.shard to gradients or parameters without a "
                    "'replicate' axis, or leave train.micro_batch out"
                )
        finally:
            if left:
                self._weights.clear()
                self._gradients.clear()

    @property
    def contents(self) -> dict[SavedItem, Tensor]:
        """All that is kept now."""
        weights = {SavedItem(SavedKind.WEIGHT, key): tensor for key, tensor in self._weights.items()}
        sums = {SavedItem(SavedKind.GRADIENT, key): tensor for key, tensor in self._gradients.items()}
        return weights | sums

    def replace(self, contents: Mapping[SavedItem, Tensor]) -> None:
        """Keep these, and nothing else."""
        self._weights = {key: x for (kind, key), x in contents.items() if kind == SavedKind.WEIGHT}
        self._gradients = {key: x for (kind, key), x in contents.items() if kind == SavedKind.GRADIENT}

    def holding(self, contents: Mapping[SavedItem, Tensor]) -> SavedGathers:
        """Another one for the same micro-batch, which begins with `contents`: for its capture."""
        other = SavedGathers()
        other.position = self.position
        other.replace(contents)
        return other

    def weight(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The weight that `make` gives, made once a step where the level keeps weights. Without autograd."""
        if self.position.level == "parameters":
            return make()
        if key not in self._weights:
            self._weights[key] = make()
        # Autograd writes its mark on the tensor that a function returns.
        return self._weights[key].detach()

    def whole(self, key: Hashable, gradient: Tensor) -> Tensor | None:
        """The sum over the micro-batches of a gradient before it is scattered; None while it is kept."""
        return self._summed(key, gradient) if self.position.level == "optimizer" else gradient

    def shards(self, key: Hashable, gradient: Tensor) -> Tensor | None:
        """The sum over the micro-batches of a gradient before it is summed over copies; None while it is kept."""
        return self._summed((key, "copies"), gradient)

    def keeps(self, key: Hashable) -> bool:
        """Whether a gradient of earlier micro-batches is kept."""
        return key in self._gradients or (key, "copies") in self._gradients

    def _summed(self, key: Hashable, gradient: Tensor) -> Tensor | None:
        before = self._gradients.pop(key, None)
        # Not in place: autograd may have given one tensor to two parameters.
        total = gradient if before is None else before + gradient
        if self.position.last:
            return total
        self._gradients[key] = total
        return None


class GatherBoundaries(SavedGathers):
    """Keeps the tensors at which a captured micro-batch can be cut from what runs once a step: gathers before it,
    reductions after it. Everything is computed in the capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[Tensor] = []
        """Weights, once they are gathered."""
        self.unreduced: list[Tensor] = []
        """Gradients before they are reduced over the shards."""
        self.unsummed: list[Tensor] = []
        """Gradients before they are summed over copies."""

    def weight(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """As `SavedGathers.weight`."""

        def kept() -> Tensor:
            self.gathered.append(tensor := make())
            return tensor

        return super().weight(key, kept).detach()

    def whole(self, key: Hashable, gradient: Tensor) -> Tensor | None:
        """As `SavedGathers.whole` in the last micro-batch."""
        self.unreduced.append(gradient)
        return gradient

    def shards(self, key: Hashable, gradient: Tensor) -> Tensor | None:
        """As `SavedGathers.shards` in the last micro-batch."""
        self.unsummed.append(gradient)
        return gradient
