"""What an optimizer is here: an update of local tensors, whose state says on which Layout it lies."""

from __future__ import annotations

from typing import Any, Protocol

from hyper_parallel.checkpoint import Piece


class Optimizer(Protocol):
    """An update of sharded parameters from their gradients.

    It is built from a list of `ShardedParameter` and its section of the run file, once the parameters have
    their values. It works on each rank's local tensors; one that needs whole matrices gathers them itself.
    """

    def step(self, lr_scale: float) -> None:
        """Update every parameter in place from its local gradient; `lr_scale` is the schedule's, 0 to 1."""
        ...

    def pieces(self) -> dict[str, Piece]:
        """The state's tensors for a checkpoint, by name: ``optimizer.<kind>.<parameter>``, never copied."""
        ...

    def state(self) -> dict[str, Any]:
        """The rest of the state, as JSON-able values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; the tensors have been read into `pieces` before."""
        ...
