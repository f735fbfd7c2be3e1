"""Host update: operators that run in host memory, where their storages lie.

    update(calls, moved, given, slots, tier)    begins to run `calls` on the slots of the storages of `moved`

Each call is an operator that works in place, elementwise, on storages that are in the tier and on scalars that the host
has (`given`). A call keeps the name of the node that it was, and the update that of its last call, so that what it
reads and writes can be held to the graph in which these were nodes (`passes.validate`). It is begun when the nodes
before it have run, and waits by itself for copies to its slots that are under way; a copy from one of them waits for
it. Its storages need no memory on the device meanwhile. What it is given it takes along as numbers when it begins
(`taken`): their memory may be given up, or written again, before the host comes to the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import fx

from hyper_parallel.compat.dispatch import below_autograd, kernel, mutated_arguments
from hyper_parallel.compat.pytree import leaves_of, mapped
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.ir import Value, values_of


@dataclass(frozen=True)
class Moved:
    """An argument of a call that lies in a slot."""

    index: int
    """Which of `moved`."""
    value: Value
    """How the call sees it."""


@dataclass(frozen=True)
class HostArguments:
    """An argument of a call that the host has."""

    index: int
    """Which of `given`."""


@dataclass(frozen=True)
class OperatorCall:
    """One operator of an update."""

    name: str
    """Of the node that it was."""
    operator: Any
    args: tuple[Any, ...]
    """In which `Moved` and `HostArguments` stand for tensors."""
    kwargs: Mapping[str, Any]

    @cached_property
    def moved(self) -> tuple[int, ...]:
        """Which of `moved` it touches, ascending."""
        return _indices((self.args, self.kwargs))

    @cached_property
    def given(self) -> tuple[int, ...]:
        """Which of `given` it is given, ascending."""
        return _indices((self.args, self.kwargs), HostArguments)

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """Which of them it changes."""
        return _indices(list(mutated_arguments(self.operator, self.args, self.kwargs)))


def update(
    calls: tuple[OperatorCall, ...],
    moved: tuple[Any, ...],
    given: tuple[Any, ...],
    slots: tuple[int, ...],
    tier: str,
) -> NoReturn:
    """Begin to run the calls on slots. `slots`: of the storage of each of `moved`; none until a plan has given some."""
    raise HyperParallelError(f"an update in {tier} was reached outside of a graph that is given its memories")


def is_update(node: fx.Node) -> bool:
    """Whether a node is one."""
    return node.op == "call_function" and node.target is update


def calls_of(node: fx.Node) -> tuple[OperatorCall, ...]:
    """What an update runs, in order."""
    return _tuple(node, 0)


def storages_of(node: fx.Node) -> tuple[int, ...]:
    """The storages that an update works on, each of `moved`."""
    return tuple(next(values_of(source)).storage for source in _tuple(node, 1))


def host_arguments_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose values the host is given."""
    return _tuple(node, 2)


def slots_of(node: fx.Node) -> tuple[int, ...]:
    """Of each storage its slot; none before there is a plan."""
    return _tuple(node, 3)


def slot_arguments(node: fx.Node, slots: tuple[int, ...]) -> None:
    """Give an update the slots that it works in."""
    node.args = (*node.args[:3], slots, node.args[4])


def tier_of(node: fx.Node) -> str:
    """Where an update runs."""
    tier = node.args[4]
    assert isinstance(tier, str)
    return tier


def writes_of(node: fx.Node) -> Iterator[int]:
    """The storages that an update changes."""
    storages = storages_of(node)
    for call in calls_of(node):
        yield from (storages[index] for index in call.writes)


@dataclass(frozen=True)
class Number:
    """What a scalar was at a moment, whatever becomes of its memory."""

    value: bool | int | float
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """It as a scalar of the host again, the same bits."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")


def taken(given: Sequence[torch.Tensor]) -> list[Number]:
    """What an update is given, as it begins: scalars that the host has."""
    return [Number(one.item(), one.dtype) for one in given]


def run(calls: Sequence[OperatorCall], memory: Sequence[torch.Tensor], given: Sequence[Number]) -> None:
    """Run calls on slots, uint8 [n] each, where their storages' bytes lie."""
    scalars = [number.tensor() for number in given]

    def tensor(argument: Any) -> Any:
        if isinstance(argument, HostArguments):
            return scalars[argument.index]
        if not isinstance(argument, Moved):
            return argument
        value = argument.value
        return memory[argument.index].view(value.dtype).as_strided(value.shape, value.stride)

    with below_autograd():
        for call in calls:
            kernel(call.operator)(*mapped(tensor, call.args), **mapped(tensor, dict(call.kwargs)))


def _tuple(node: fx.Node, at: int) -> tuple[Any, ...]:
    found: Any = node.args[at]
    return tuple(found)


def _indices(tree: Any, kind: type[Moved | HostArguments] = Moved) -> tuple[int, ...]:
    return tuple(sorted({leaf.index for leaf in leaves_of(tree) if isinstance(leaf, kind)}))
