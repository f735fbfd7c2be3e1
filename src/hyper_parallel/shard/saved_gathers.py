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
from contextvars import ContextVar

from torch import Tensor

from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy.memory import ShardLevel

Item = tuple[str, Hashable]
"""`weight` or `gradient`, and whose it is."""


class SavedGathers:
    """Weights and gradients of one model, from a step's first micro-batch to its last."""

    def __init__(self) -> None:
        self._weights: dict[Hashable, Tensor] = {}
        self._gradients: dict[Hashable, Tensor] = {}
        self._level: ShardLevel = "parameters"
        self._last = True

    @contextlib.contextmanager
    def micro_batch(self, level: ShardLevel, *, last: bool) -> Iterator[None]:
        """Compute one micro-batch inside; after the `last` one nothing is kept.

        Raises StrategyError when a gradient was kept for the last one, which then did not use its parameter.
        """
        self._level, self._last = level, last
        token = _current.set(self)
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
            _current.reset(token)
            if left:
                self._weights.clear()
                self._gradients.clear()

    @property
    def at_hand(self) -> tuple[ShardLevel, bool]:
        """The level, and whether this is the step's last micro-batch."""
        return self._level, self._last

    @property
    def contents(self) -> dict[Item, Tensor]:
        """All that is kept now."""
        weights: dict[Item, Tensor] = {("weight", key): tensor for key, tensor in self._weights.items()}
        return weights | {("gradient", key): tensor for key, tensor in self._gradients.items()}

    def replace(self, contents: Mapping[Item, Tensor]) -> None:
        """Keep these, and nothing else."""
        self._weights = {key: tensor for (what, key), tensor in contents.items() if what == "weight"}
        self._gradients = {key: tensor for (what, key), tensor in contents.items() if what == "gradient"}

    @contextlib.contextmanager
    def stand_in(self, contents: Mapping[Item, Tensor]) -> Iterator[SavedGathers]:
        """Inside, the micro-batch at hand keeps in another one, which begins with `contents`: while it is captured."""
        other = SavedGathers()
        other._level, other._last = self.at_hand
        other.replace(contents)
        token = _current.set(other)
        try:
            yield other
        finally:
            _current.reset(token)

    def weight(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives, made once a step where the level keeps weights. Without autograd."""
        if self._level == "parameters":
            return make()
        if key not in self._weights:
            self._weights[key] = make()
        # Autograd writes its mark on the tensor that a function returns.
        return self._weights[key].detach()

    def whole(self, key: Hashable, gradient: Tensor) -> Tensor | None:
        """The sum over the micro-batches of a gradient before it is scattered; None while it is kept."""
        return self._summed(key, gradient) if self._level == "optimizer" else gradient

    def shards(self, key: Hashable, gradient: Tensor) -> Tensor | None:
        """The sum over the micro-batches of a gradient before it is summed over copies; None while it is kept."""
        return self._summed((key, "copies"), gradient)

    def _summed(self, key: Hashable, gradient: Tensor) -> Tensor | None:
        before = self._gradients.pop(key, None)
        # Not in place: autograd may have given one tensor to two parameters.
        total = gradient if before is None else before + gradient
        if self._last:
            return total
        self._gradients[key] = total
        return None


_current: ContextVar[SavedGathers | None] = ContextVar("kept", default=None)


def current_gathers() -> SavedGathers | None:
    """That of the micro-batch at hand; None outside of one, where nothing is kept."""
    return _current.get()
