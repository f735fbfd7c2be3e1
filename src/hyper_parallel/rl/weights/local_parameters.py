"""A model's parameters as a weight transfer sees them: their description, and this rank's tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hyper_parallel.compat import fsdp
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.rl.weights.description import Description, Parameter
from hyper_parallel.shard.sharded_model import is_sharded, sharded


def describe(model: nn.Module, role: str, world: int = 1) -> Description:
    """The parameters of a role's model; the same on all its ranks.

    `model`: one that `parallelize` returned, or any other, of which each of the role's `world` ranks holds a copy.
    Experts that are placed anew by their loads change it: ask again afterwards.
    """
    if is_sharded(model):
        fsdp.free_gathered(model)
        listed = [
            (p.name, p.layout, p.parameter.dtype, tuple(tuple(group.ranks) for group in p.owners))
            for p in sharded(model).parameters()
        ]
    else:
        listed = [
            (name, Layout.replicated(Mesh(), tuple(p.shape)), p.dtype, ())
            for name, p in model.named_parameters()
        ]
    parameters = tuple(
        Parameter(
            name=name,
            layout=_on_ranks(layout, world),
            dtype=str(dtype).removeprefix("torch."),
            groups=groups or (tuple(range(world)),),
        )
        for name, layout, dtype, groups in listed
    )
    return Description(role=role, world=world, parameters=parameters, ties=_ties(model))


def local_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """This rank's part of each parameter that it holds, by the name in the description, without autograd. Writing to
    one writes the parameter."""
    if is_sharded(model):
        fsdp.free_gathered(model)  # a forward pass without a backward pass leaves whole parameters behind
        return {p.name: p.local for p in sharded(model).owned()}
    return {name: p.detach() for name, p in model.named_parameters()}


def _on_ranks(layout: Layout, world: int) -> Layout:
    """A layout on a mesh of one rank, which is every process's own, as copies on all ranks of the role."""
    if layout.mesh.world == 1 and world > 1:
        return Layout.replicated(Mesh(("replicate", world)), layout.shape)
    return layout


def _ties(model: nn.Module) -> dict[str, str]:
    """Second and further names of parameters to their first."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties
