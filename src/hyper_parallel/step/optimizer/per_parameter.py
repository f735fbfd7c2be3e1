"""Base of optimizers that update one parameter after the other: state by kind, checkpoints, the count of updates.

A subclass gives the tensors that it keeps of a parameter (`_kept`), their layouts (`_layout`), and the update
(`_update`), written with ordinary PyTorch operators on this rank's elements. The same operators run in an eager step
and in a captured one, so that both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hyper_parallel.checkpoint import Piece
from hyper_parallel.compat.memory import present
from hyper_parallel.layout import Layout
from hyper_parallel.shard import ShardedParameter
from hyper_parallel.step.optimizer.interface import zeros


@dataclass(frozen=True)
class Shape:
    """What is kept of a parameter under one kind: a local shape and a dtype."""

    local: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Held:
    """A parameter on this rank, with its state."""

    parameter: ShardedParameter
    local: Tensor
    """This rank's elements, without autograd."""
    kept: dict[str, Tensor]
    """State by its kind."""
    count: Tensor | None
    """Updates so far: zero-dim fp32; None for an optimizer that does not depend on their number."""


class PerParameter:
    """An optimizer over `parameters`; a parameter without a gradient is left alone in that step."""

    NAME: ClassVar[str]
    """The optimizer's name in run files."""
    COUNTS: ClassVar[bool] = True
    """Whether an update depends on how many there have been."""

    def __init__(self, parameters: Sequence[ShardedParameter], config: Any) -> None:
        self.config = config
        self._step = 0
        self._all = [self._held(parameter) for parameter in parameters]

    def _held(self, parameter: ShardedParameter) -> Held:
        local = parameter.local.detach()
        kept = {
            kind: zeros(f"optimizer.{kind}.{parameter.name}", local, shape.local, shape.dtype)
            for kind, shape in self._kept(parameter, local).items()
        }
        count = torch.zeros((), dtype=torch.float32, device=local.device) if self.COUNTS else None
        return Held(parameter, local, kept, count)

    def _kept(self, parameter: ShardedParameter, local: Tensor) -> dict[str, Shape]:
        """Kind of state to its local shape and dtype."""
        raise NotImplementedError

    def _layout(self, kind: str, layout: Layout) -> Layout:
        """Where state of a kind lies, from the parameter's layout."""
        return layout

    def _update(self, held: Held, grad: Tensor, lr: float | Tensor) -> None:
        """Update one parameter and its state in place. `lr` is a number, or zero-dim float64 on the host."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, lr_scale: float | Tensor) -> None:
        """One update of every parameter that has a gradient."""
        self._step += 1
        lr = self.config.lr * lr_scale
        for held in self._all:
            grad = held.parameter.grad
            if grad is None and held.local.numel():
                continue
            # A rank that holds no element still takes part in the collectives of an update.
            grad = grad if grad is not None else torch.zeros_like(held.local)
            if held.count is not None:
                held.count.add_(1)
            self._update(held, grad, lr)

    def _decay(self, held: Held) -> float:
        """The weight decay of a parameter: none where it has fewer than two dims."""
        return float(self.config.weight_decay) if len(held.parameter.layout.shape) >= 2 else 0.0

    def advance(self) -> None:
        """Count an update that a step's graph did."""
        self._step += 1

    def pieces(self) -> dict[str, Piece]:
        """``optimizer.<kind>.<parameter>`` for each kind of state."""
        return {
            f"optimizer.{kind}.{held.parameter.name}": Piece(
                tensor, self._layout(kind, held.parameter.layout), held.parameter.owners
            )
            for held in self._all
            for kind, tensor in held.kept.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """What `pieces` has, and each parameter's number of updates."""
        found = {name: piece.local for name, piece in self.pieces().items()}
        for held in self._all:
            if held.count is not None:
                found[f"optimizer.step.{held.parameter.name}"] = held.count
        return found

    def state(self) -> dict[str, Any]:
        """``{"name": ..., "step": updates done}``."""
        return {"name": self.NAME, "step": self._step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back the number of updates."""
        self._step = int(state["step"])
        for held in self._all:
            if held.count is not None:
                with present(held.count, changed=True):
                    held.count.fill_(self._step)


def wide(*tensors: Tensor) -> torch.dtype:
    """The dtype in which an update is computed: float32, or float64 where a tensor has that."""
    found = torch.float32
    for tensor in tensors:
        found = torch.promote_types(found, tensor.dtype)
    return found


def move(held: Held, update: Tensor, lr: float | Tensor, decay: float) -> None:
    """p ← p − lr · λ p − lr · update, computed in the dtype of `update`; a rate on the host multiplies last."""
    local = held.local
    if isinstance(lr, Tensor) and local.dim() == 0:
        # Of two tensors without dims the wider dtype would win; a number never widens.
        lr = lr.to(update.dtype)
    value = local.to(update.dtype)
    if decay:
        value = value - value * decay * lr
    local.copy_(value - update * lr)
