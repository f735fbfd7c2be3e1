"""Regions: the layer instance, the micro-batch and the phase that each node of a step is part of.

`capture` gives every node its region, and passes keep it: a node that repeats another has the layer and the micro-batch
of the other one. The layer of a node is

- that of its module: the module's path up to its first index, such as `model.layers.3`;
- outside of all modules, from the backward pass on, that of the tensors that it reads: a gradient that is added to the
  sum of its parameter, a norm, an update;
- else, where one layer alone uses it, that one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from torch import fx

from hyper_parallel.graph.ir import StepGraph, values_of
from hyper_parallel.graph.phase import Phase
from hyper_parallel.graph.step_context import current_step

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
_EARLY = ("forward", "loss")


@dataclass(frozen=True)
class Region:
    """Where a node belongs."""

    layer: str
    """Name of the layer instance; "" outside of layers."""
    micro_batch: int | None
    """None for the step's prologue and epilogue, which run once: clipping and the update, for example."""
    phase: Phase


def region_of(node: fx.Node) -> Region:
    """The region of a node."""
    region = node.meta["region"]
    assert isinstance(region, Region)
    return region


def layer_of(module: str) -> str:
    """The name of the layer instance that a module is part of; "" outside of layers.

    >>> layer_of("model.layers.3.mlp.experts.7")
    'model.layers.3'
    """
    found = _LAYER.match(module)
    return found.group() if found else ""


def micro_batch(index: int) -> AbstractContextManager[None]:
    """What is captured in the block belongs to this micro-batch."""
    return replace(current_step(), micro_batch=index).installed()


def layer_finder(modules: Iterable[str]) -> Callable[[str], str]:
    """A function of a tensor's name that finds the layer whose module the name contains: the model's modules are given,
    and a tensor may have a prefix, as in `parameter.model.layers.3.mlp.weight`."""
    layers = frozenset(map(layer_of, modules))

    def find(name: str) -> str:
        parts = name.split(".")
        found = (layer_of(".".join(parts[start:])) for start in range(len(parts)))
        return next((layer for layer in found if layer and layer in layers), "")

    return find


def locate(step: StepGraph, layer_named: Callable[[str], str]) -> None:
    """Give the nodes outside of all modules, whose regions have no layer yet, that of the tensors they read or of their
    only users. `layer_named` finds the layer of a parameter's name."""
    of = storage_layers(step.placeholders)
    of |= {storage: layer_named(name) for storage, name in step.gradients.items()}
    nodes = list(step.nodes)
    last = ""
    for node in nodes:
        region = region_of(node)
        if not node.meta["module"] and region.phase not in _EARLY:
            _move(node, _layer_of_tensors(node, of, last))
        layer = region_of(node).layer
        last = layer or last
        for value in values_of(node):
            of.setdefault(value.storage, layer)
    for node in reversed(nodes):
        region = region_of(node)
        if not region.layer and not node.meta["module"] and region.phase not in _EARLY:
            users = {region_of(user).layer for user in node.users}
            _move(node, users.pop() if len(users) == 1 else "")


def storage_layers(nodes: Iterable[fx.Node]) -> dict[int, str]:
    """Each storage to the layer of the first of the nodes that gives a value in it."""
    found: dict[int, str] = {}
    for node in nodes:
        for value in values_of(node):
            found.setdefault(value.storage, region_of(node).layer)
    return found


def _layer_of_tensors(node: fx.Node, of: Mapping[int, str], last: str) -> str:
    layers = {of.get(value.storage, "") for source in node.all_input_nodes for value in values_of(source)}
    layers.discard("")
    if len(layers) == 2 and region_of(node).phase == "backward" and last in layers:
        # A sum of gradients that two layers have to give: it runs with the one whose turn it is.
        return last
    return layers.pop() if len(layers) == 1 else ""


def _move(node: fx.Node, layer: str) -> None:
    node.meta["region"] = replace(region_of(node), layer=layer)
