"""Nodes of the host: points at which it reads values or answers, and optimizer updates that it runs.

A host point is captured as a node; run from a graph, the run yields there (`execute`); run eagerly, it is an error,
since there is nobody to ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import fx

from hyper_parallel.compat.dispatch import below_autograd, kernel, leaves_of, mapped, mutated_arguments
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.ir import Value, values_of

_library = torch.library.Library("hyper_parallel", "FRAGMENT")
_library.define("host(str point, Tensor[] values, int count, ScalarType dtype=float) -> Tensor")


def _nobody(
    point: str, values: Sequence[torch.Tensor], count: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    raise HyperParallelError(f"the host point {point!r} was reached outside of a captured graph")


def _fake(
    point: str, values: Sequence[torch.Tensor], count: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return values[0].new_empty(count, dtype=dtype)


_library.impl("host", _nobody, "CompositeExplicitAutograd")
_library.impl("host", _fake, "Meta")


class HostPoint(StrEnum):
    """Why a run stops and asks the host. A graph's node has the text; every host is given the member."""

    LOAD = "load"
    """The device has the backward pass to compute: the host loads the next batch and says what this rank has to say."""
    CHECK = "check"
    """The host is shown what the step came to, and may raise before anything is updated."""
    ROWS = "rows"
    """The host is shown the largest load of the experts of all ranks, and may raise before there is memory for it."""
    LOOK = "look"
    """The host is shown a tensor, and gives nothing."""
    TURN = "turn"
    """The forward pass is over: the host is shown what it gives, and answers with the gradient of the first of it."""
    GRADIENT = "gradient"
    """The host answers with the gradient of a further output."""
    END = "end"
    """The backward pass is over."""
    FORWARD = "forward"
    """A pipeline stage's forward pass is over: the host is shown what goes to later stages."""
    RECEIVE = "receive"
    """The host answers with the next value that comes back from a later stage."""
    INPUT = "input"
    """A pipeline stage's gradients of inputs are computed: the host is shown what goes back to earlier stages."""
    BEGIN = "begin"
    """An instruction of a pipeline's program begins: where a rank's whole list is one graph, the host keeps count."""
    POST = "post"
    """The host posts a receive, and answers with the memory that it will fill (`offloading.schedule.build_problem`)."""
    SEND = "send"
    """The host begins to send what it is shown."""
    WAIT = "wait"
    """The host waits for transfers."""
    PAUSE = "pause"
    """A collective is about to be waited for: another task may run meanwhile. It is no node of the graph; the executor
    adds it where it is given `pauses`."""


HOST = torch.ops.hyper_parallel.host.default
torch.fx.node.has_side_effect(HOST)


def host(
    point: HostPoint, values: Sequence[torch.Tensor], count: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Ask the host: it is shown `values`, at least one, and gives [count] of `dtype` on their device."""
    answer: torch.Tensor = HOST(point.value, list(values), count, dtype=dtype)
    return answer


# Host update: operators that run in host memory, where their storages lie.
#
#     update(calls, moved, given, slots, tier)    begins to run `calls` on the slots of the storages of `moved`
#
# Each call is an operator that works in place, elementwise, on storages that are in the tier and on scalars that the
# host has (`given`). A call keeps the name of the node that it was, and the update that of its last call, so that what
# it reads and writes can be held to the graph in which these were nodes (`passes.validate`). It is begun when the nodes
# before it have run, and waits by itself for copies to its slots that are under way; a copy from one of them waits for
# it. Its storages need no memory on the device meanwhile. What it is given it takes along as numbers when it begins
# (`taken`): their memory may be given up, or written again, before the host comes to the update.


@dataclass(frozen=True)
class Moved:
    """An argument of a call that lies in a slot."""

    index: int
    value: Value
    """How the call sees it."""


@dataclass(frozen=True)
class HostArguments:
    """An argument of a call that the host has."""

    index: int


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
        """The places in `moved` of what it touches, ascending."""
        return _indices((self.args, self.kwargs))

    @cached_property
    def given(self) -> tuple[int, ...]:
        """The places in `given` of its arguments, ascending."""
        return _indices((self.args, self.kwargs), HostArguments)

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """The ones that it changes."""
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
    return node.op == "call_function" and node.target is update


def calls_of(node: fx.Node) -> tuple[OperatorCall, ...]:
    return _tuple(node, 0)


def storages_of(node: fx.Node) -> tuple[int, ...]:
    """The storages that an update works on, each of `moved`."""
    return tuple(next(values_of(source)).storage for source in _tuple(node, 1))


def host_arguments_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose values the host is given."""
    return _tuple(node, 2)


def slots_of(node: fx.Node) -> tuple[int, ...]:
    """The slot of each storage; none before there is a plan."""
    return _tuple(node, 3)


def slot_arguments(node: fx.Node, slots: tuple[int, ...]) -> None:
    """Give an update the slots that it works in."""
    node.args = (*node.args[:3], slots, node.args[4])


def tier_of(node: fx.Node) -> str:
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
    """The value of a scalar at a moment, whatever becomes of its memory."""

    value: bool | int | float
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """It as a scalar of the host again, the same bits."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")


def taken(given: Sequence[torch.Tensor]) -> list[Number]:
    """Arguments of an update as it begins: scalars that the host has."""
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
