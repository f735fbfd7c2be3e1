"""Muon (Jordan et al. 2024): hidden matrices move along their orthogonalised momentum, the rest by AdamW.

    m ← μ m + (1 − μ) g
    u = (1 − μ) g + μ m                                            Nesterov
    p ← p − lr · λ p − lr · √max(1, out / in) · orthogonalise(u)

Hidden matrices are the weights of two dims that belong to no embedding and to no output head. The momentum is
laid out as the parameter; orthogonalising needs the whole matrix, so u is gathered over the axes that split it,
every rank computes the same, and cuts out its part. Fused projections (query, key and value in one matrix) are
orthogonalised part by part, also where nothing is split, so that the update does not depend on the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.checkpoint import Piece
from hyper_parallel.config.train import MuonConfig
from hyper_parallel.shard import ShardedModel, ShardedParameter, sharded
from hyper_parallel.shard.model_structure import dim_of_features, fused_parts, heads_of, text_config
from hyper_parallel.step.optimizer.adamw import AdamW
from hyper_parallel.step.optimizer.interface import zeros


@dataclass(frozen=True)
class HiddenMatrix:
    """How one hidden matrix is orthogonalised."""

    output: int
    """The dim of its output features: 0 for nn.Linear, 1 for Conv1D."""
    parts: tuple[int, ...]
    """Lengths of the fused parts of that dim; one when nothing is fused."""


def hidden_matrices(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, HiddenMatrix]:
    """Parameter name to how it is orthogonalised, for every hidden matrix of a model.

    `shapes`: parameter name to the shape of the whole parameter, of which the model may hold a piece.

    The output head is `get_output_embeddings()`, or in a module without that, any linear layer with as many
    outputs as an embedding has rows.
    """
    modules = dict(model.named_modules())
    embeddings = [m for m in modules.values() if isinstance(m, nn.Embedding)]
    ends = {id(m.weight) for m in embeddings}
    get_head = getattr(model, "get_output_embeddings", None)
    if get_head is not None:
        head = get_head()
        ends |= {id(head.weight)} if head is not None else set()
    else:
        rows = {m.num_embeddings for m in embeddings}
        ends |= {
            id(m.weight) for m in modules.values() if isinstance(m, nn.Linear) and m.out_features in rows
        }
    config = text_config(model)
    found: dict[str, HiddenMatrix] = {}
    for name, parameter in model.named_parameters():
        if len(shapes[name]) != 2 or id(parameter) in ends:
            continue
        owner = name.rpartition(".")[0]
        module, parent = modules[owner], modules[owner.rpartition(".")[0]]
        output = dim_of_features(module, output=True)
        features = shapes[name][output]
        parts = fused_parts(owner, features, parent, heads_of(parent, config))
        found[name] = HiddenMatrix(output, parts)
    return found


class Muon:
    """Muon over `parameters`; those that `hidden` does not name are left to AdamW."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        config: MuonConfig,
        handle: ShardedModel,
        hidden: dict[str, HiddenMatrix],
    ) -> None:
        self.config = config
        self._handle = handle
        self._hidden = [(p, hidden[p.name]) for p in parameters if p.name in hidden]
        self._locals = [p.local.detach() for p, _ in self._hidden]
        self._momentum = [
            zeros(f"optimizer.momentum.{p.name}", local)
            for (p, _), local in zip(self._hidden, self._locals, strict=True)
        ]
        self._others = AdamW([p for p in parameters if p.name not in hidden], config.adamw)

    @classmethod
    def of(cls, model: nn.Module, parameters: list[ShardedParameter], config: MuonConfig) -> Muon:
        """Muon for a parallelized model."""
        handle = sharded(model)
        shapes = {name: layout.shape for name, layout in handle.plan.layouts().items()}
        return cls(parameters, config, handle, hidden_matrices(model, shapes))

    @torch.no_grad()
    def step(self, lr_scale: float | Tensor) -> None:
        """One update of every parameter that has a gradient."""
        lr, mu = self.config.lr * lr_scale, self.config.momentum
        for (parameter, how), local, momentum in zip(self._hidden, self._locals, self._momentum, strict=True):
            grad = parameter.grad
            if grad is None and local.numel():
                continue
            # A rank that holds no rows still takes part in the gather.
            grad = grad if grad is not None else torch.zeros_like(local)
            momentum.lerp_(grad, 1 - mu)
            whole = self._handle.gather(grad.lerp(momentum, mu), parameter.layout)
            update = self._handle.cut(self._orthogonal(whole, how), parameter.layout)
            local.mul_(1 - lr * self.config.weight_decay)
            local.sub_((update * lr).to(local.dtype))
        self._others.step(lr_scale)

    def _orthogonal(self, whole: Tensor, how: HiddenMatrix) -> Tensor:
        pieces = []
        for part in whole.split(how.parts, how.output):
            outputs, inputs = part.size(how.output), part.size(1 - how.output)
            pieces.append(orthogonalise(part, self.config.steps) * max(1.0, outputs / inputs) ** 0.5)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, how.output)

    def advance(self) -> None:
        """Count an update that a step's graph did."""
        self._others.advance()

    def pieces(self) -> dict[str, Piece]:
        """``optimizer.momentum.<parameter>`` for the hidden matrices, and AdamW's for the rest."""
        momenta = zip(self._hidden, self._momentum, strict=True)
        mine = {
            f"optimizer.momentum.{p.name}": Piece(momentum, p.layout, p.owners)
            for (p, _), momentum in momenta
        }
        return {**mine, **self._others.pieces()}

    def tensors(self) -> dict[str, Tensor]:
        """What `pieces` has, and AdamW's numbers of updates."""
        return {**{name: piece.local for name, piece in self.pieces().items()}, **self._others.tensors()}

    def state(self) -> dict[str, Any]:
        """``{"name": "muon", "adamw": AdamW's state}``."""
        return {"name": "muon", "adamw": self._others.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back AdamW's state; Muon has none but its momentum."""
        self._others.load_state(state["adamw"])


# The Newton–Schulz iteration that makes a matrix nearly orthogonal (Jordan et al. 2024, "Muon").
#
#     X₀ = G / ‖G‖
#     A = Xᵢ Xᵢᵀ,  Xᵢ₊₁ = a Xᵢ + (b A + c A²) Xᵢ        (a, b, c) = (3.4445, −4.7750, 2.0315)
#
# The quintic's coefficients are the reference's, chosen for the steepest slope at 0: after five iterations the
# singular values lie between about 0.7 and 1.2, not at 1. It is computed in fp32, where the reference takes
# bf16: a matrix gathered from shards then gives the same update on any strategy.

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix_MN: Tensor, steps: int) -> Tensor:
    """About U Vᵀ of the singular value decomposition U Σ Vᵀ of [M, N]; fp32 of the same shape. A zero stays zero."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrix_MN.float()
    # The shorter side first: the products are then of the smaller Gram matrix.
    transposed = x.size(0) > x.size(1)
    if transposed:
        x = x.mT
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x
