"""Modules as they are streamed: which weights lie together, and where in a flat buffer.

A decoder layer is one module, or, if it has more than `SPLIT` bytes, its parts are: attention, MLP, single projections.
Where a layer has experts whose weights are stacked, [E, ...], each expert is one, and the layer is divided around them.
Outside of the layers each module with its own weights is one: embedding, head. Modules of a few bytes (norms), and
weights that several modules share, always are on the device; a head that shares its table with the embedding is
streamed, and the embedding's rows are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.memory_plan import Module
from hyper_parallel.shard.experts.plan import is_experts
from hyper_parallel.shard.model_structure import layers_of
from hyper_parallel.units import round_up

SPLIT = 16 << 20
"""Bytes above which a module is streamed in parts: a few milliseconds of reading from a fast disk."""
ALIGN = 64
"""Alignment of weights, in bytes."""
_SMALL = 0.02
"""Of a layer's bytes: modules with less are not streamed."""


@dataclass(frozen=True)
class Part:
    """One weight of a module: whose it is, and where its bytes are among the module's."""

    owners: tuple[tuple[nn.Module, str], ...]
    name: str
    """In the model."""
    shape: torch.Size
    """Of one expert's, where the weight is a stack of them."""
    dtype: torch.dtype
    first: int
    expert: int | None = None
    """Its number in the stack."""

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The weight in a buffer, uint8, with the module's bytes."""
        return buffer[self.first : self.first + self.bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is streamed as one, or of a module of `experts` experts the one with the number `expert`.
    `tables`: embeddings that look rows up in its only weight."""

    name: str
    module: nn.Module
    parts: tuple[Part, ...]
    bytes: int
    tables: tuple[nn.Module, ...] = ()
    expert: int | None = None
    experts: int = 0

    @property
    def size(self) -> Module:
        """For the plan."""
        return Module(self.name, self.bytes, gatherable=self.module in self.tables)

    @property
    def row(self) -> int:
        """Bytes of a row of a table."""
        part = self.parts[0]
        return part.bytes // part.shape[0]


def units_of(model: nn.Module) -> list[Unit]:
    """The modules of a model that can be streamed, in the order in which the model names them."""
    found = layers_of(model)
    if found is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of layers, whose weights could be streamed; remove memory.device"
        )
    _, layers = found
    modules: list[tuple[str, nn.Module]] = []
    prefix_of = {id(module): name for name, module in model.named_modules()}
    inside: set[int] = set()
    total = 0
    for layer in dict.fromkeys(layers):
        total += _bytes(layer) - sum(_bytes(one) for one in layer.modules() if stacked_experts(one))
        inside.update(id(module) for module in layer.modules())
        modules += _divided(prefix_of[id(layer)], layer)
    least = _SMALL * total / len(layers)
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for name, module in model.named_modules():
        if id(module) not in inside and module._parameters:
            modules.append((name, module))
        for own, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, own, f"{name}.{own}" if name else own))
    order = {id(module): place for place, module in enumerate(model.modules())}
    modules.sort(key=lambda one: order[id(one[1])])
    found_units: list[Unit] = []
    for name, module in modules:
        if count := stacked_experts(module):
            found_units += _experts(name, module, count)
        else:
            unit = _unit(name, module, owners, whole=id(module) in inside)
            if unit is not None and unit.bytes >= least:
                found_units.append(unit)
    return found_units


def by_module(units: Iterable[Unit]) -> list[list[Unit]]:
    """The units of each module: one, or its experts."""
    return [list(group) for _, group in itertools.groupby(units, key=lambda unit: id(unit.module))]


def _divided(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module, or its children where it is larger than `SPLIT`, or has experts, and has some with weights."""
    children = [(own, child) for own, child in module.named_children() if _bytes(child)]
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict)  # they have no forward pass
    mixture = any(map(stacked_experts, module.modules())) and not stacked_experts(module)
    if children and (listed or mixture or _bytes(module) > SPLIT):
        for own, child in children:
            yield from _divided(f"{name}.{own}", child)
    else:
        yield name, module


def _experts(name: str, module: nn.Module, count: int) -> Iterator[Unit]:
    """A unit for each expert."""
    for expert in range(count):
        parts, at = list[Part](), 0
        for own, parameter in module._parameters.items():
            if parameter is not None:
                where = ((module, own),)
                parts.append(
                    Part(where, f"{name}.{own}", parameter.shape[1:], parameter.dtype, at, expert=expert)
                )
                at += round_up(parts[-1].bytes, ALIGN)
        yield Unit(name, module, tuple(parts), at, expert=expert, experts=count)


def _unit(
    name: str, module: nn.Module, owners: dict[int, list[tuple[nn.Module, str, str]]], whole: bool
) -> Unit | None:
    """The unit of a module with the weights below it (`whole`) or its own; None where it has none that can leave."""
    within = set(map(id, module.modules())) if whole else {id(module)}
    parameters = {id(one): one for one in module.parameters(recurse=whole)}
    parts, at, tables = list[Part](), 0, list[nn.Module]()
    for key, parameter in parameters.items():
        outside = [owner for owner, _, _ in owners[key] if id(owner) not in within]
        if not _plain(parameter):
            continue
        if outside and not all(map(_is_table, outside)):
            continue
        if outside and len(parameters) > 1:
            continue
        if outside and _is_table(module):
            return None  # the other module's
        tables += outside
        own = tuple((owner, own) for owner, own, _ in owners[key])
        parts.append(Part(own, owners[key][0][2], parameter.shape, parameter.dtype, at))
        at += round_up(parts[-1].bytes, ALIGN)
    if _is_table(module) and len(parts) == 1:
        tables.append(module)
    return Unit(name, module, tuple(parts), at, tuple(tables)) if parts else None


def _plain(parameter: Tensor) -> bool:
    """Whether its bytes are all that there is to it."""
    return type(parameter) is nn.Parameter and parameter.layout == torch.strided


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and module.max_norm is None


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


# Experts of a mixture whose weights can be read one by one.
#
# Transformers stacks the experts of a layer in parameters [E, ...], and the own code of modules that go through its
# experts interface takes one expert's matrix after the other by its number. A module of another kind has its
# projections streamed as a whole.


def stacked_experts(module: nn.Module) -> int:
    """The number of experts E of a module whose weights are stacks of E, each for itself and plain; else 0."""
    count = getattr(module, "num_experts", 0)
    stacks = list(module.parameters(recurse=False))
    if not is_experts(module) or not hasattr(type(module).forward, "__wrapped__") or not stacks:
        return 0
    # Other weights of the module, and those of modules below it, have no expert's number.
    if len(stacks) != len(list(module.parameters())) or not isinstance(count, int):
        return 0
    return count if all(type(one) is nn.Parameter and one.shape[:1] == (count,) for one in stacks) else 0
