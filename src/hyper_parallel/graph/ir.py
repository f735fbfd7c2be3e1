"""Graph IR: StepGraph, the values on its edges, the storages that hold them.

Beside ATen operators a graph has tier operators, which move storages between memories, and collectives over process
groups. A module's parameters and buffers become inputs of a captured step (`module_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import fx, nn

from hyper_parallel.compat.dispatch import once_each
from hyper_parallel.compat.fx_graph import append_copy
from hyper_parallel.errors import CaptureError, HyperParallelError

# Tier operators: the four graph operators that move a storage between memory tiers.
#
#     store(x, slot, tier)      begins to copy the storage of x into its slot in another tier
#     prefetch(x, slot, tier)   gives the storage memory again and begins to fill it from the slot
#     wait(x, slot, tier)       what follows finds the last copy to or from the slot over
#     detach(x, slot, tier)     gives the storage's memory up, since the slot holds what is in it
#
# After HyperOffload (arXiv 2602.00748, section 3), in place: the storage loses and regains its memory, so that every
# view of it, and a parameter that lies in it, stay the objects that they are. When bytes are there follows from the
# order of the nodes alone, and not from how fast copies are: before a `detach` stands the `wait` for its `store`, and
# from the `prefetch` on the memory is taken.

Rest = Literal["step", "here", "away"]
"""Between steps a slot is of no use (`step`); or it holds what lives on, which is on the device too (`here`) or only in
the slot (`away`)."""


@dataclass(frozen=True)
class Slot:
    """The place of a storage in a tier."""

    storage: int
    tier: str
    bytes: int
    rest: Rest = "step"
    first: int = 0
    """Of the step's nodes before its moves, the one before which the first copy to the slot begins."""
    last: int = 0
    """The one before which the last copy from it is waited for. Of what rests here the slot is always needed."""


def store(x: Any, slot: int, tier: str) -> NoReturn:
    """Begin to copy the storage of `x` into its slot."""
    _unreachable("store", slot)


def prefetch(x: Any, slot: int, tier: str) -> NoReturn:
    """Give the storage of `x` memory, and begin to fill it from its slot."""
    _unreachable("prefetch", slot)


def wait(x: Any, slot: int, tier: str) -> NoReturn:
    """Wait until the last copy to or from the slot is over."""
    _unreachable("wait", slot)


def detach(x: Any, slot: int, tier: str) -> NoReturn:
    """Give up the memory of the storage of `x`."""
    _unreachable("detach", slot)


def is_cache(node: fx.Node) -> bool:
    """Whether a node is one of the four."""
    return node.op == "call_function" and node.target in OPERATORS


def slot_of(node: fx.Node) -> int:
    """The slot that a cache operator is about."""
    assert is_cache(node), f"{node} ({node.target}) moves nothing"
    slot = node.args[1]
    assert isinstance(slot, int)
    return slot


OPERATORS = (store, prefetch, wait, detach)


def _unreachable(name: str, slot: int) -> NoReturn:
    raise HyperParallelError(
        f"{name} of slot {slot} was reached outside of a graph that is given its memories"
    )


Size = Any
"""A number of elements or bytes: an int, or a torch.SymInt of sizes that only a run knows."""

Kind = Literal["parameter", "buffer", "optimizer", "gradient", "input", "constant", "activation", "temporary"]
"""What a storage holds. `gradient`: of a parameter, until the update. `activation`: made before the backward pass and
used in it. `temporary`: everything else."""


@dataclass(frozen=True)
class Value:
    """The value on one edge of the graph."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    storage: int
    """Index into `StepGraph.storages`. Views share one."""

    def in_storage(self, storage: int) -> Value:
        """The same value in another storage."""
        # A third of the time of dataclasses.replace, and graphs have many values.
        return Value(self.shape, self.stride, self.dtype, self.device, storage)

    @property
    def elements(self) -> Size:
        count = 1
        for size in self.shape:
            count = count * size
        return count

    @property
    def bytes(self) -> Size:
        """Bytes of the elements, each counted once even where an expanded dim repeats it."""
        count: Size = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            if not (isinstance(stride, int) and stride == 0):
                count = count * size
        return count


@dataclass(frozen=True)
class Storage:
    """Memory that one or several values lie in."""

    index: int
    bytes: Size
    device: torch.device
    name: str | None = None
    """Of the input that brings it; None for what the step makes itself."""


@dataclass(frozen=True)
class Input:
    """A tensor that the step reads from outside; state is also written to, in place."""

    name: str
    kind: Kind


class GivenTensor(NamedTuple):
    """A tensor that a step reads from outside, for its capture."""

    kind: Kind
    tensor: torch.Tensor


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks that a collective joins."""

    name: str
    """Of the process group, as the graph's nodes have it."""
    axis: str
    """Of the mesh: an axis, a joint such as ``shard*context``, or a fold such as ``expert``."""
    ranks: tuple[int, ...]
    """Global ranks in the group's order."""


@dataclass(frozen=True)
class Even:
    """The value of a data-dependent size where rows spread evenly."""

    rows: int
    scales: bool
    """More popular experts make it larger in proportion."""
    part: int
    """The sizes that were declared together have the same number."""
    most: int
    """What all of the part are together at most, whatever the data."""


@dataclass(eq=False)
class StepGraph:
    """One rank's step: a flat graph of ATen operators, in the order in which they run.

    Every node's `meta` has: "value", a `Value` or a nested tuple or list of them, absent for numbers;
    "region" (`step_context`); "module", the name of the module whose forward or backward it is part of; "recomputed".
    What it does to memory, `memory_effects` tells; a target that is no operator says in "writes" which storages it
    changes. "when" is set where the graph is the body of a loop (`graph.accumulate`).
    """

    graph: fx.Graph
    inputs: list[Input]
    """In the order of the placeholders."""
    outputs: list[str]
    """Names, in the order of what the graph returns."""
    storages: list[Storage]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Real tensors that the step was written with, by the target of their get_attr node."""
    gradients: dict[int, str] = field(default_factory=dict)
    """Storage of a gradient to the name of its parameter."""
    sizes: dict[Any, fx.Node] = field(default_factory=dict)
    """Symbol of a size that depends on the data to the node that computes it; empty where none does."""
    even: dict[Any, Even] = field(default_factory=dict)
    """Symbol to what it is where tokens spread evenly, for `sizes.balanced_sizes`."""
    balanced: bool = False
    """The sizes are those of rows that spread evenly, whatever the data: right for costs, and never to be run."""
    groups: Mapping[str, CollectiveGroup] = field(default_factory=dict)
    """The process groups by name; read by `collective_groups.group_of`."""
    slots: Mapping[int, Slot] = field(default_factory=dict)
    """The places that storages have in other tiers, by the numbers that cache operators name."""
    short: Callable[[], StepGraph] | None = None
    """Makes the same step of the model with few of its layers, where those are alike: for trials of what is then
    applied to all. Passes rewrite it likewise, up to one that moves storages."""

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """Nodes that compute, in order: no placeholders, constants and output."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of `inputs`."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outside(self) -> dict[int, Input]:
        """Each storage that the step does not make itself, and the input that brings it: of several the last."""
        return {
            value.storage: entry
            for entry, node in zip(self.inputs, self.placeholders, strict=True)
            for value in values_of(node)
        }

    @property
    def output(self) -> fx.Node:
        last: fx.Node = next(iter(reversed(self.graph.nodes)))
        assert last.op == "output"
        return last

    @property
    def returned(self) -> dict[str, fx.Node]:
        """Each output and the node that gives it; one node may give several."""
        return dict(zip(self.outputs, self.output.args[0], strict=True))  # type: ignore[arg-type]

    def copy(self) -> StepGraph:
        """Another graph of the same nodes, to be changed without changing this one."""
        return self.copied()[0]

    def copied(self, order: Sequence[fx.Node] | None = None) -> tuple[StepGraph, dict[fx.Node, fx.Node]]:
        """A copy, and which of its nodes each node of this graph became. Nodes keep their names. `order`: of the nodes
        that compute, in the copy; they then stand behind all placeholders and constants."""
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        nodes: Iterable[fx.Node] = self.graph.nodes
        if order is not None:
            given = [node for node in self.graph.nodes if node.op not in ("call_function", "output")]
            nodes = (*given, *order, self.output)
        for old in nodes:
            known[old] = append_copy(graph, old, known)
        sizes = {symbol: known[node] for symbol, node in self.sizes.items()}
        copy = StepGraph(
            graph,
            list(self.inputs),
            list(self.outputs),
            list(self.storages),
            dict(self.constants),
            dict(self.gradients),
            sizes,
            dict(self.even),
            self.balanced,
            self.groups,
            self.slots,
        )
        return copy, known


def values_of(node: fx.Node) -> Iterator[Value]:
    """The tensors that a node gives, one after the other."""
    return iter(flat_values(node.meta.get("value")))


def mapped_value(value: Any, function: Callable[[Value], Value]) -> Any:
    """A `meta["value"]` with what a function makes of each of its tensors."""
    if isinstance(value, Value):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped_value(part, function) for part in value)
    return value


def moved_value(value: Any, storages: Mapping[int, int]) -> Any:
    """A `meta["value"]` with some of its storages replaced by others."""
    return mapped_value(value, lambda one: one.in_storage(storages.get(one.storage, one.storage)))


def flat_values(value: Any) -> Sequence[Value]:
    """The tensors of a `meta["value"]`."""
    # Nearly all nodes give one tensor, and planners ask very often.
    if isinstance(value, Value):
        return (value,)
    if isinstance(value, tuple | list):
        return [one for part in value for one in flat_values(part)]
    return ()


# Process groups of a graph's collectives: their ranks and mesh axis.
#
# A graph names a group as the runtime does, which says nothing to a reader. `capture` takes no Strategy, so whoever
# made the groups tells it which name means what (`shard.process_mesh.ProcessMesh.process_groups`).

_ARGUMENT = "group_name"


def is_collective(node: fx.Node) -> bool:
    """Whether a node begins a collective. Waiting for one is another node (`is_wait`)."""
    return _role(node.target) == "begins"


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits until a collective is done."""
    return _role(node.target) == "waits"


def group_of(step: StepGraph, node: fx.Node) -> CollectiveGroup:
    """The group of a node that begins a collective, or that waits for one.

    Raises CaptureError when the step was captured without being told of that group.
    """
    while is_wait(node):
        (begun,) = node.args
        assert isinstance(begun, fx.Node)
        node = begun
    name = group_name(node)
    found = step.groups.get(name)
    if found is None:
        known_groups = ", ".join(sorted(step.groups)) or "none"
        raise CaptureError(
            f"the graph's {node.target} is over the process group {name!r}, of which the capture was not told "
            f"(told of: {known_groups}); give `capture` the axis and the ranks of each group in `groups`"
        )
    return found


def group_name(node: fx.Node) -> str:
    """The name of the process group of a node that begins a collective."""
    assert is_collective(node), f"{node.target} begins no collective"
    return str(
        node.kwargs[_ARGUMENT] if _ARGUMENT in node.kwargs else node.args[_place_of_group(node.target)]
    )


def ranks_of(step: StepGraph) -> list[int]:
    """The global ranks that the step's collectives join, ascending; rank 0 where there are none."""
    return sorted({rank for group in step.groups.values() for rank in group.ranks} | {0})


@once_each
def _role(target: Any) -> Literal["begins", "waits", ""]:
    """The part of an operator in a collective."""
    if getattr(target, "namespace", "") != "_c10d_functional":
        return ""
    return "waits" if "wait" in str(target) else "begins"


@once_each
def _place_of_group(target: Any) -> int:
    """The place of the group among a collective's arguments."""
    return next(i for i, argument in enumerate(target._schema.arguments) if argument.name == _ARGUMENT)


def module_state(model: nn.Module) -> dict[str, GivenTensor]:
    """Parameters as ``parameter.<name>`` and buffers as ``buffer.<name>``; tied ones under their first name."""
    parameters = {f"parameter.{name}": GivenTensor("parameter", x) for name, x in model.named_parameters()}
    return parameters | {f"buffer.{name}": GivenTensor("buffer", x) for name, x in model.named_buffers()}


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of `module_state`, by name."""
    return {name: given.tensor for name, given in module_state(model).items()}
