"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on local tensors, through PyTorch's fused kernels.

    m ← β₁ m + (1 − β₁) g
    v ← β₂ v + (1 − β₂) g²
    p ← p − lr · λ p − lr · m̂ / (√v̂ + ε)

The update is elementwise, so a rank updates the elements that it holds and nothing is communicated. Parameters
of two or more dims are decayed, embeddings and the head among them (GPT-3's and nanoGPT's choice); norms and
biases are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.checkpoint import Piece
from hyper_parallel.compat.kernels import adamw_
from hyper_parallel.compat.memory import present
from hyper_parallel.config.train import AdamWConfig
from hyper_parallel.shard import ShardedParameter
from hyper_parallel.step.optimizer.interface import zeros


@dataclass
class _Group:
    """Parameters with one weight decay; lists are in the same order."""

    weight_decay: float
    parameters: list[ShardedParameter]
    locals: list[Tensor] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for parameter in self.parameters:
            local = parameter.local.detach()
            self.locals.append(local)
            self.first.append(zeros(f"optimizer.exp_avg.{parameter.name}", local))
            self.second.append(zeros(f"optimizer.exp_avg_sq.{parameter.name}", local))
            self.steps.append(torch.zeros((), dtype=torch.float32, device=local.device))


class AdamW:
    """AdamW over the local tensors of `parameters`; a parameter without a gradient is left alone in that step."""

    def __init__(self, parameters: Sequence[ShardedParameter], config: AdamWConfig) -> None:
        self.config = config
        decayed = [p for p in parameters if len(p.layout.shape) >= 2]
        others = [p for p in parameters if len(p.layout.shape) < 2]
        self._groups = [_Group(config.weight_decay, decayed), _Group(0.0, others)]
        self._step = 0

    @torch.no_grad()
    def step(self, lr_scale: float | Tensor) -> None:
        """One update of every parameter that has a gradient."""
        self._step += 1
        apart = isinstance(lr_scale, Tensor)
        for group in self._groups:
            grads = [parameter.grad for parameter in group.parameters]
            # An empty local tensor (more ranks than rows) has nothing to update, and kernels may refuse it.
            held = [i for i, grad in enumerate(grads) if grad is not None and grad.numel()]
            for some in [[i] for i in held] if apart else [held] if held else []:
                adamw_(
                    [group.locals[i] for i in some],
                    [grad for i in some if (grad := grads[i]) is not None],
                    [group.first[i] for i in some],
                    [group.second[i] for i in some],
                    [group.steps[i] for i in some],
                    lr=self.config.lr * lr_scale,
                    betas=self.config.betas,
                    weight_decay=group.weight_decay,
                    eps=self.config.eps,
                )

    def advance(self) -> None:
        """Count an update that a step's graph did."""
        self._step += 1

    def pieces(self) -> dict[str, Piece]:
        """``optimizer.exp_avg.<parameter>`` and ``optimizer.exp_avg_sq.<parameter>``, laid out as the parameter."""
        pieces: dict[str, Piece] = {}
        for group in self._groups:
            for parameter, first, second in zip(group.parameters, group.first, group.second, strict=True):
                pieces[f"optimizer.exp_avg.{parameter.name}"] = Piece(
                    first, parameter.layout, parameter.owners
                )
                pieces[f"optimizer.exp_avg_sq.{parameter.name}"] = Piece(
                    second, parameter.layout, parameter.owners
                )
        return pieces

    def tensors(self) -> dict[str, Tensor]:
        """What `pieces` has, and each parameter's number of updates."""
        found = {name: piece.local for name, piece in self.pieces().items()}
        for group in self._groups:
            for parameter, step in zip(group.parameters, group.steps, strict=True):
                found[f"optimizer.step.{parameter.name}"] = step
        return found

    def state(self) -> dict[str, Any]:
        """``{"name": "adamw", "step": updates done}``."""
        return {"name": "adamw", "step": self._step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back the number of updates, on which the bias correction depends."""
        self._step = int(state["step"])
        for group in self._groups:
            for step in group.steps:
                with present(step, changed=True):
                    step.fill_(self._step)
