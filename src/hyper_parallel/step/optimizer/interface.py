"""Optimizer interface: an update of local tensors with state in declared Layouts."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hyper_parallel.checkpoint import Piece
from hyper_parallel.compat.memory import filled, hollow


class Optimizer(Protocol):
    """An update of sharded parameters from their gradients.

    It is built from a list of `ShardedParameter` and its section of the run file, once the parameters have
    their values. It works on each rank's local tensors; one that needs whole matrices gathers them itself.
    """

    config: Any
    """The section of the run file that it was built from."""

    def step(self, lr_scale: float | Tensor) -> None:
        """Update every parameter in place from its local gradient; `lr_scale` is the schedule's, 0 to 1.

        While a step is captured it is a zero-dim float64 tensor on the host, so that the graph serves every step;
        updates then go parameter by parameter, so that each may run as soon as its gradient is there.
        """
        ...

    def advance(self) -> None:
        """A step's graph has done an update on the tensors: count it, as `step` would have."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state that `step` reads or writes, by a name of its own."""
        ...

    def pieces(self) -> dict[str, Piece]:
        """The state's tensors for a checkpoint, by name: ``optimizer.<kind>.<parameter>``, never copied.
        Where a tensor is laid out as its parameter, with the layout that the parameter has now: experts may move."""
        ...

    def state(self) -> dict[str, Any]:
        """The rest of the state, as JSON-able values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; the tensors have been read into `pieces` before."""
        ...


def zeros(
    name: str,
    like: Tensor,
    shape: tuple[int, ...] | torch.Size | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of the state, by its name there: zeros on the device of `like`, and of its shape and dtype unless others
    are given."""
    shape, dtype = like.shape if shape is None else shape, like.dtype if dtype is None else dtype
    same = shape == like.shape and dtype == like.dtype
    made = hollow(torch.empty_like(like) if same else like.new_empty(shape, dtype=dtype))
    with filled(name, made):
        return made.zero_()
