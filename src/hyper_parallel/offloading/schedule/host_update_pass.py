"""Optimizer updates on the host, where their state lies (ZeRO-Offload).

Of a parameter that is updated *apart* the state lies in the host's memory for good, the slot of the parameter is its
master, and per step only its gradient goes there and the new value comes back:

    bytes moved a step    apart: gradient + parameter       on the device: 2 · (state + parameter)

so with Adam's two moments a third of what it takes to bring everything to the device and back (Ren et al.,
ZeRO-Offload, arXiv 2101.06840, section 3). The kernels are those of the step, on the same bytes, one element after
another, so that the bits are those of the same kernels undisturbed. The norm stays on the device, and what it needs of
a gradient is computed as soon as that is whole; clipping multiplies by a scalar and goes along to the host. All of it
comes behind the host point that may stop the step, as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.dispatch import mapped
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import (
    StepGraph,
    Storage,
    balanced_sizes,
    dependencies,
    values_of,
)
from hyper_parallel.graph.dependencies import arrange, check_order
from hyper_parallel.graph.host_nodes import (
    HostArguments,
    Moved,
    OperatorCall,
    host_arguments_of,
    is_update,
    storages_of,
    update,
)
from hyper_parallel.graph.ir import Value
from hyper_parallel.graph.memory_effects import touched, writes
from hyper_parallel.graph.reorder_for_memory import sums_first
from hyper_parallel.offloading.schedule.problem import OffloadTier
from hyper_parallel.offloading.schedule.slot_allocator import ALIGN

PARTS = 4
NEAR = ("host", "pool")
"""Spaces that are the host's memory."""
_UPDATES = ("_fused_adamw_", "_fused_adam_")
"""Operators that update each element by itself: of parameters, gradients, and then all their state."""
_SCALES = ("mul_",)
"""Those by which a gradient is scaled, each element by itself."""
_COUNTS = ("_foreach_add_",)
"""Those by which updates are counted."""


@dataclass(frozen=True)
class HostUpdate:
    """An update that can run apart."""

    parameter: str
    """The name of its input."""
    nodes: tuple[fx.Node, ...]
    """All that goes to the host, in order: the gradient's scaling, the count of updates, the update."""
    tensors: tuple[fx.Node, ...]
    """Of the parameter, of its gradient and of each state one node in its storage, from before them."""

    @property
    def storages(self) -> tuple[int, ...]:
        """The storages of `tensors`."""
        return tuple(next(values_of(node)).storage for node in self.tensors)


def can_run_on_host(step: StepGraph) -> list[HostUpdate]:
    """The updates of a step that can run on the host, in the order of their parameters' first uses.

    These are the updates of one parameter by a fused Adam or AdamW whose parameter, gradient and state each fill one
    storage of static size, and whose state nothing else reads. Other updates stay on the device.
    """
    facts = _Facts(step)
    found = [one for node in step.nodes if _name(node) in _UPDATES and (one := facts.apart(node)) is not None]
    return sorted(found, key=lambda one: facts.place[facts.users[one.storages[0]][0]])


@dataclass(frozen=True)
class InParts:
    """Host updates as a setting of a search: setting k moves k / `PARTS` of the possible updates to the host."""

    tier: str
    room: int
    """Bytes of the tier that they may use."""

    def __call__(self, step: StepGraph, setting: int, refused: bool = False) -> StepGraph:
        """The step at a setting from 0 (none) to `PARTS` (all)."""
        names = latest(step, setting / PARTS, self.room)
        return move_to_host(step, names, self.tier) if names else step


def in_parts(step: StepGraph, spaces: Iterable[OffloadTier]) -> InParts | None:
    """The setting of a search in the first space that the host can compute in; None where no update can be there."""
    found = next((space for space in spaces if space.name in NEAR), None)
    if found is None or not latest(step, 1.0, found.bytes):
        return None
    return InParts(found.name, found.bytes)


def on_host(step: StepGraph, spaces: Iterable[OffloadTier]) -> StepGraph:
    """The step with all the updates on the host that can be there. Raises BudgetError where none can."""
    parts = in_parts(step, spaces)
    if parts is None:
        raise BudgetError(
            "strategy.memory.update is 'host', and no update can run there: it takes memory.host or memory.pool with "
            "room for a parameter, its gradient and its state, and the optimizer adamw; leave the key out, or mend that"
        )
    return parts(step, PARTS)


def latest(step: StepGraph, share: float, room: int) -> list[str]:
    """Parameters whose updates make up a share of the bytes of those that can be apart, those that are used last first,
    as far as there is room for them, their gradients and their state.

    Their gradients come first in the backward pass, and they are wanted last in the next step: nothing else leaves the
    links so much time.
    """
    found = can_run_on_host(step)
    wanted = share * sum(step.storages[one.storages[0]].bytes for one in found)
    names: list[str] = []
    for one in reversed(found):
        needed = [-(-step.storages[storage].bytes // ALIGN) * ALIGN for storage in one.storages]
        if wanted > 0 and sum(needed) <= room:
            names.append(one.parameter)
            wanted -= step.storages[one.storages[0]].bytes
            room -= sum(needed)
    return names


def move_to_host(step: StepGraph, parameters: Collection[str], tier: str) -> StepGraph:
    """The step with the updates of these parameters on the host; `step` stays as it is.

    `parameters`: names of inputs, each of one of `can_run_on_host`. `tier`: where their state is to lie. Before the
    step can run, `offloading.schedule.offload_pass` has to give them slots.
    """
    chosen = [one for one in can_run_on_host(step) if one.parameter in parameters]
    assert len(chosen) == len(set(parameters)), f"{len(chosen)} of {len(set(parameters))} can be apart"
    copy, new = step.copied()
    at_home: dict[fx.Node, fx.Node] = {}
    for one in chosen:
        _replace(copy, HostUpdate(one.parameter, _all(one.nodes, new), _all(one.tensors, new)), at_home, tier)
    needs = dependencies(copy)
    order = _order(sums_first(copy, needs, balanced_sizes(copy)), needs)
    check_order(copy, order, needs=needs)
    arrange(copy, order)
    return copy


def _all(nodes: Iterable[fx.Node], new: dict[fx.Node, fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(new[node] for node in nodes)


class _Facts:
    """Index of a step by which `can_run_on_host` judges each update."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self.place = {node: at for at, node in enumerate(step.graph.nodes)}
        self.users: dict[int, list[fx.Node]] = {}
        """The nodes that touch each storage, in order."""
        for node in step.nodes:
            for storage in touched(node):
                self.users.setdefault(storage, []).append(node)
        self._outside = step.outside

    def apart(self, node: fx.Node) -> HostUpdate | None:
        """The host update for a node; None where the update has to stay on the device."""
        arguments: Any = node.args
        lists = [arg for arg in arguments if isinstance(arg, list | tuple) and arg]
        tensors: list[fx.Node] = [arg[0] for arg in lists]
        if any(len(arg) > 1 for arg in lists) or len(lists) < 4 or not all(map(self._whole, tensors)):
            return None
        master, gradient, *state = (tensor.meta["value"].storage for tensor in tensors)
        kinds = [self._kind(storage) for storage in (master, gradient, *state)]
        if kinds != ["parameter", None, *["optimizer"] * len(state)] or len({master, *state}) <= len(state):
            return None
        if self.users[master][0] is node:
            return None
        along = {node, *self._scaling(gradient, node)}
        for storage in state:
            along |= {user for user in self.users[storage] if _name(user) in _COUNTS}
        own = {master, gradient, *state}
        for one in along:
            for source in one.all_input_nodes:
                if not _storages(source) <= own and not _is_scalar(source):
                    return None
        alone = all(set(self.users[storage]) <= along for storage in state)
        last = self.users[master][-1] is node and self.users[gradient][-1] is node
        if not alone or not last or any(set(one.users) - along for one in along):
            return None
        ordered = tuple(sorted(along, key=self.place.__getitem__))
        before = tuple(_before(tensor, along) for tensor in tensors)
        return HostUpdate(self._outside[master].name, ordered, before)

    def _whole(self, node: fx.Node) -> bool:
        """Whether a node's value is all of its storage, of a size that is known before the step runs."""
        value = node.meta.get("value")
        if not isinstance(value, Value):
            return False
        count = self._step.storages[value.storage].bytes
        return isinstance(count, int) and isinstance(value.bytes, int) and 0 < value.bytes == count

    def _kind(self, storage: int) -> str | None:
        entry = self._outside.get(storage)
        return None if entry is None else entry.kind

    def _scaling(self, gradient: int, node: fx.Node) -> list[fx.Node]:
        """What scales the gradient when nothing but the update looks at it any more."""
        found: list[fx.Node] = []
        for user in reversed(self.users[gradient]):
            if user is node:
                continue
            if _name(user) not in _SCALES or gradient not in writes(user):
                break
            found.append(user)
        return found


def _storages(source: fx.Node) -> set[int]:
    """The storages that a node's value lies in."""
    return {value.storage for value in values_of(source)}


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).split(".")[0]


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("value")
    return isinstance(value, Value) and value.shape == ()


def _before(tensor: fx.Node, along: set[fx.Node]) -> fx.Node:
    """What an operator in place was given, where its own result is what goes along."""
    while tensor in along:
        source = tensor.args[0]
        assert isinstance(source, fx.Node)
        tensor = source
    return tensor


def _replace(copy: StepGraph, one: HostUpdate, at_home: dict[fx.Node, fx.Node], tier: str) -> None:
    """An update in the place of its nodes."""
    index = {storage: at for at, storage in enumerate(one.storages)}
    given: dict[fx.Node, int] = {}

    def argument(source: object) -> object:
        if not isinstance(source, fx.Node):
            return source
        value = source.meta["value"]
        if value.storage in index:
            return Moved(index[value.storage], value)
        return HostArguments(given.setdefault(_on_host(copy, source, at_home), len(given)))

    calls: list[OperatorCall] = []
    for node in one.nodes:
        args, kwargs = (mapped(argument, part) for part in (node.args, dict(node.kwargs)))
        calls.append(OperatorCall(node.name, node.target, args, kwargs))
    *others, last = one.nodes
    last.target, last.kwargs = update, {}
    arguments: Any = (tuple(calls), one.tensors, tuple(given), (), tier)
    last.args = arguments
    for node in reversed(others):
        copy.graph.erase_node(node)


def _on_host(made: StepGraph, source: fx.Node, at_home: dict[fx.Node, fx.Node]) -> fx.Node:
    """A scalar where the host has it: itself, or a copy that is made once."""
    value = source.meta["value"]
    if value.device.type == "cpu":
        return source
    if source not in at_home:
        cpu = torch.device("cpu")
        with made.graph.inserting_after(source):
            copy = made.graph.call_function(torch.ops.aten._to_copy.default, (source,), {"device": cpu})
        made.storages.append(Storage(len(made.storages), value.bytes, cpu))
        copy.meta = {
            **{key: source.meta[key] for key in ("region", "module")},
            "recomputed": False,
            "value": Value(value.shape, value.stride, value.dtype, cpu, made.storages[-1].index),
        }
        at_home[source] = copy
    return at_home[source]


def _order(nodes: list[fx.Node], needs: Mapping[fx.Node, Collection[fx.Node]]) -> list[fx.Node]:
    """Updates begin as early as they may, in the order in which their parameters are wanted in the next step."""
    first: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for storage in touched(node):
            first.setdefault(storage, at)
    rank: dict[fx.Node, int] = {}
    for at, node in enumerate(nodes):
        if is_update(node):
            rank[node] = first.get(storages_of(node)[0], at)
            rank.update((source, at) for source in host_arguments_of(node) if source.op == "call_function")
    # A tuple, so that there is always another place right behind one: (3,) < (3, 1) < (4,).
    places: dict[fx.Node, tuple[int, ...]] = {}
    for at, node in enumerate(nodes):
        places[node] = (at,)
        if node in rank:
            places[node] = (*max((places[other] for other in needs[node]), default=(-1,)), rank[node])
    return sorted(nodes, key=places.__getitem__)
