"""The 2D plan put into effect: wrappers around layers, their norms, regions and projections.

Arithmetic is the model's own, on local weights; between, activations [batch, sequence, features] move by the tables of
docs/tensor2d.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import per_rank_int
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.dropout import Stretch
from hyper_parallel.shard.hooks import Forward, all_positions, at_edges, wrap
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.model_structure import dim_of_features, is_conv1d
from hyper_parallel.shard.plan.plan import Plan
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.shard.tensor.apply_1d import (
    GatheredInput,
    _entering,
    _leaving,
    _localise_heads,
    bias_left_out,
)
from hyper_parallel.shard.tensor.factorization import FEATURES, SEQUENCE, Attention, Mlp, digit, part_of_x
from hyper_parallel.shard.tensor.norm import distributed_norm

Move = Callable[[torch.Tensor], torch.Tensor]


def apply_tensor_2d(model: nn.Module, plan: Plan, axes: ProcessMesh) -> dict[str, Stretch]:
    """Wrap what the 2D plan names. Parameters are given their local tensors elsewhere.

    Returns, by region, the stretches in which activations are split otherwise than between regions.
    """
    found = plan.tensor2d
    stretches: dict[str, Stretch] = {}
    if found is None:
        return stretches
    for name, formula in found.norms.items():
        module = model.get_submodule(name)
        wrap(module, distributed_norm(formula, module, found.hidden, axes["tensor_x"]))
    for name, attention in found.attentions.items():
        stretches[name] = _attention(model.get_submodule(name), model, name, attention, plan, axes)
    for name, mlp in found.mlps.items():
        stretches[name] = _mlp(model.get_submodule(name), model, mlp, plan, axes)
    tensor = axes[plan.mesh.tensor]
    for name in plan.whole:
        # Inside of what is swapped, positions are split over all ranks and features are whole.
        swapped = name in found.swapped
        wrap(
            model.get_submodule(name),
            all_positions(lambda x: tensor.gather(x, SEQUENCE), lambda x: tensor.split(x, SEQUENCE))
            if swapped
            else all_positions(lambda x: _whole(x, axes), lambda x: _split(x, axes)),
        )
    # [T/y, h/x] to [T/(y·x), h] and back: what is inside sees what 1D with the sequence split sees.
    x, last = axes["tensor_x"], FEATURES % 3
    for name in found.swapped:
        wrap(
            model.get_submodule(name),
            all_positions(lambda h: x.swap(h, SEQUENCE, last), lambda h: x.swap(h, last, SEQUENCE)),
        )
    return stretches


def apply_edges_2d(model: nn.Module, plan: Plan, axes: ProcessMesh) -> None:
    """Split activations on the way into the first layer, and gather them on the way out of the last; after all else
    that is put around layers."""
    if plan.tensor2d is None:
        return
    assert plan.layers is not None
    at_edges(model.get_submodule(plan.layers), lambda x: _split(x, axes), lambda x: _whole(x, axes))


def split_between(plan: Plan, axes: ProcessMesh, name: str) -> dict[int, Axis]:
    """The dims of activations that are split outside of regions' stretches where the module `name` stands."""
    if not plan.sequence or not name.startswith(f"{plan.layers}."):
        return {}
    if any(name.startswith(f"{whole}.") for whole in plan.whole):
        return {}
    found = plan.tensor2d
    if found is None or any(name.startswith(f"{swapped}.") for swapped in found.swapped):
        return {SEQUENCE: axes[plan.mesh.tensor]}
    return {SEQUENCE: axes["tensor_y"], FEATURES: axes["tensor_x"]}


def _split(x: torch.Tensor, axes: ProcessMesh) -> torch.Tensor:
    """[B, S, h] to [B, S / y, h / x]."""
    if x.dim() != 3:
        raise StrategyError(
            f"axes.tensor_y expects activations [batch, sequence, features]; they have {x.dim()} dims"
        )
    ranks = axes["tensor_y"].size * axes["tensor_x"].size
    if x.size(SEQUENCE) % ranks:
        raise StrategyError(
            f"axes.tensor_y splits {x.size(SEQUENCE)} positions over tensor_y · tensor_x = {ranks}, which does not "
            "divide them; pad the sequence to a multiple of it"
        )
    return axes["tensor_x"].split(axes["tensor_y"].split(x, SEQUENCE), FEATURES)


def _whole(x: torch.Tensor, axes: ProcessMesh) -> torch.Tensor:
    return axes["tensor_y"].gather(axes["tensor_x"].gather(x, FEATURES), SEQUENCE)


def _attention(
    module: nn.Module, model: nn.Module, name: str, plan: Attention, whole: Plan, axes: ProcessMesh
) -> Stretch:
    x, y = axes["tensor_x"], axes["tensor_y"]
    given = GatheredInput()
    wrap(module, given.region(lambda h: y.gather_sum(h, SEQUENCE), plan.keeps))
    _localise_heads(module, plan.heads, x.size * y.size)
    sharing = axes[part_of_x(whole.mesh, plan.sharing, 1) if plan.sharing > 1 else digit(1, 1)]
    for child, parts in plan.colwise.items():
        scatter = ScatterHeads(x, parts, plan.shares[child], sharing, plan.heads.size)
        _product(model.get_submodule(child), child, whole, axes, given, scatter)
    stretch = Stretch(dims={FEATURES: axes[whole.mesh.tensor]}, heads=plan.heads.query)
    rowwise = model.get_submodule(plan.rowwise)
    _product(rowwise, plan.rowwise, whole, axes, GatheredInput(), lambda out: y.reduce_split(out, SEQUENCE),
             lambda h: x.gather_sum(h, FEATURES), plan.keeps)  # fmt: skip
    features = plan.heads.query * plan.heads.size
    return _stretch(stretch, features, [model.get_submodule(child) for child in plan.colwise], rowwise)


def _mlp(module: nn.Module, model: nn.Module, plan: Mlp, whole: Plan, axes: ProcessMesh) -> Stretch:
    mesh = whole.mesh
    names = plan.axes(mesh)
    up, k, r = (axes[name] for name in (names.hidden_in, names.k, names.r))
    y, beside = axes["tensor_y"], axes[part_of_x(mesh, mesh.size("tensor_x") // plan.factors.up, 1)]

    # Features before positions on the way in, after them on the way out: what is permuted is then the smaller tensor,
    # and gathering positions permutes nothing. The bytes are those of one gather over both.
    def enter(h: torch.Tensor) -> torch.Tensor:
        return y.gather_sum(beside.gather_sum(h, FEATURES), SEQUENCE)

    def between(h: torch.Tensor) -> torch.Tensor:
        return up.gather_sum(k.gather_sum(h, FEATURES), SEQUENCE)

    def leave(out: torch.Tensor) -> torch.Tensor:
        return r.reduce_split(y.reduce_split(out, SEQUENCE), FEATURES)

    given = GatheredInput()
    wrap(module, given.region(enter, plan.keeps))
    for child in plan.colwise:
        _product(
            model.get_submodule(child), child, whole, axes, given, lambda out: up.reduce_split(out, SEQUENCE)
        )
    rowwise = model.get_submodule(plan.rowwise)
    _product(rowwise, plan.rowwise, whole, axes, GatheredInput(), leave, between, plan.keeps_between)
    stretch = Stretch(dims={SEQUENCE: up, FEATURES: axes[names.features]})
    return _stretch(stretch, plan.between, [model.get_submodule(child) for child in plan.colwise], rowwise)


def _stretch(stretch: Stretch, features: int, colwise: list[nn.Module], rowwise: nn.Module) -> Stretch:
    """The stretch between a region's first products and its last; `features` are those of all ranks."""
    for module in colwise:
        wrap(module, _entering(stretch, features))
    wrap(rowwise, _leaving(stretch))
    return stretch


def _product(
    module: nn.Module,
    name: str,
    plan: Plan,
    axes: ProcessMesh,
    given: GatheredInput,
    leave: Move,
    enter: Move | None = None,
    keeps: bool = True,
) -> None:
    """Wrap a linear map: what it is given is gathered by `enter`, its product is summed and scattered by `leave`, and
    then the bias is added, which lies as the result does."""
    if is_conv1d(module):
        layout = plan.parameters[f"{name}.weight"].computed
        dim = dim_of_features(module, output=True)
        module.__dict__["nf"] = per_rank_int(lambda r: layout.local_shape(axes.devices.coordinate(r))[dim])

    def wrapper(forward: Forward, x: torch.Tensor) -> Any:
        if enter is not None:
            x = given.enter(x, enter, keeps)
        try:
            with bias_left_out(module) as bias, given.saving():
                output = forward(x)
        finally:
            if enter is not None:
                given.leave()
        output = leave(output)
        return output if bias is None else output + bias

    wrap(module, wrapper)


# From products that are partial over tensor_x to whole heads, and back.
#
# Each rank of tensor_x has a term of all the heads that its rank of tensor_y computes. A reduce-scatter along
# the features gives each one its own heads, whole. Where there are fewer key-value heads than ranks, it gives each one
# an equal stretch of a head's positions, and the ranks that attend with the head put it together: less than sending
# each of them all of it. The permutation that brings the heads of a rank together is the only copy.


@dataclass(frozen=True)
class ScatterHeads:
    """[B, S, F] partial over `x` to [B, S, heads of this rank]: the parts of F side by side, each on its own."""

    x: Axis
    parts: tuple[int, ...]
    """The features of the parts, on each rank of tensor_y."""
    shared: tuple[bool, ...]
    """Whether ranks share the heads of a part: as many as `sharing` has."""
    sharing: Axis
    size: int
    """Features of a head."""

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        if self.x.size == 1:
            return partial
        if not any(self.shared) or self.sharing.size == 1:
            return self.x._move(self._scatter, self._gather, partial)
        # A query, if the projection has one, comes first; keys and values are alike.
        own = sum(length for length, shared in zip(self.parts, self.shared, strict=True) if not shared)
        both = partial[..., own:]
        mine = self.sharing.gather_sum(
            self.x._move(self._scatter_shared, self._gather_shared, both), SEQUENCE
        )
        if not own:
            return mine
        query = self.x._move(self._scatter, self._gather, partial[..., :own])
        return torch.cat([query, mine], FEATURES)

    # Whole heads for each rank.

    def _own(self) -> list[int]:
        return [length for length, shared in zip(self.parts, self.shared, strict=True) if not shared]

    def _scatter(self, partial: torch.Tensor) -> torch.Tensor:
        n = self.x.size
        pieces = [
            part.unflatten(-1, (n, part.size(-1) // n)).movedim(-2, 0)
            for part in partial.split(self._own(), -1)
        ]
        rows = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, -1)
        return self.x._reduce_scatter_rows(rows.flatten(0, 1))

    def _gather(self, gradient: torch.Tensor) -> torch.Tensor:
        n = self.x.size
        rows = self.x._gather_rows(gradient).unflatten(0, (n, gradient.size(0)))
        pieces = rows.split([length // n for length in self._own()], -1)
        if len(pieces) == 1:
            whole: torch.Tensor = rows.movedim(0, -2).reshape(*gradient.shape[:-1], -1)
            return whole
        return torch.cat([row for piece in pieces for row in piece.unbind(0)], -1)

    # Heads that several ranks share: [B, S, k·heads·size] and [heads·r, B, S / r, k·size], with r ranks to a head
    # and k = 2 where keys and values come together.

    def _scatter_shared(self, partial: torch.Tensor) -> torch.Tensor:
        r, k = self.sharing.size, sum(self.shared)
        heads = self.x.size // r
        opened = partial.unflatten(-1, (k, heads, self.size)).unflatten(
            SEQUENCE, (r, partial.size(SEQUENCE) // r)
        )
        rows = opened.permute(4, 1, 0, 2, 3, 5).flatten(-2)
        return self.x._reduce_scatter_rows(rows.reshape(self.x.size * rows.size(2), *rows.shape[3:]))

    def _gather_shared(self, gradient: torch.Tensor) -> torch.Tensor:
        r, k = self.sharing.size, sum(self.shared)
        heads, (batch, stretch, _) = self.x.size // r, gradient.shape
        rows = self.x._gather_rows(gradient).reshape(heads, r, batch, stretch, k, self.size)
        return rows.permute(2, 1, 3, 4, 0, 5).reshape(batch, r * stretch, -1)
