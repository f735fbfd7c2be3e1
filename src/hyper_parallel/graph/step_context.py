"""Context of a step, and where in it a node belongs: its phase, micro-batch and layer.

Whoever computes a step, or captures one, builds a `StepContext` from the one at hand, and installs it around the
computation:

    with replace(current_step(), draw=draw, documents=True).installed():
        loss = model(**inputs)

Hooks and wrappers inside unmodified modules, which take no further argument, read `current_step()`. A context never
changes, so that a layer that is computed again in the backward pass is so under the context of its forward pass.
`capture` gives every node the `Region` that follows from the context and the node's module.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, fx

from hyper_parallel.graph.ir import StepGraph, values_of

if TYPE_CHECKING:
    from hyper_parallel.graph.ir import Even

Phase = Literal["forward", "loss", "backward", "clip", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "clip", "optimizer")
"""In the order of the step."""


def phase(name: Phase) -> AbstractContextManager[None]:
    """Inside, computation belongs to this phase."""
    return replace(current_step(), phase=name).installed()


# Regions: the layer instance, the micro-batch and the phase that each node of a step is part of.
#
# `capture` gives every node its region, and passes keep it: a node that repeats another has the layer and the
# micro-batch of the other one. The layer of a node is
#
# - that of its module: the module's path up to its first index, such as `model.layers.3`;
# - outside of all modules, from the backward pass on, that of the tensors that it reads: a gradient that is added to
# the
#   sum of its parameter, a norm, an update;
# - else, where one layer alone uses it, that one.

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
    """Inside, captured nodes belong to this micro-batch."""
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


@dataclass(frozen=True)
class Draw:
    """What is being computed: random numbers are a function of it and of the global element."""

    seed: int
    step: int | Tensor
    """A zero-dim int64 tensor while a step is captured, so that the graph serves every step."""
    rows: Tensor
    """int64[B]: the index in the step's global batch of each row at hand."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a part of a step is computed under. Each default is that of a computation that is no part of a step."""

    phase: Phase = "forward"
    """Recorded on each captured node, as is the micro-batch."""
    micro_batch: int | None = None
    """None outside of all: in the step's prologue and epilogue."""
    draw: Draw | None = None
    """What random numbers are a function of; None refuses dropout."""
    gathers: Any = None
    """Weights and gradient sums kept between the micro-batches of the step; None keeps nothing."""
    documents: bool | None = None
    """Whether rows hold several packed documents; None looks at the values of position_ids."""
    expert_rows: int = 1
    """Rows of each expert are filled up to a multiple of this: a product of few rows adds up in another order, and a
    generated token must not depend on how many tokens of other requests an expert gets."""
    widest_spread: bool = False
    """For the memory of a pass only: experts get as many rows, and as many of filling, as any choice can give them."""
    even_load: float | None = None
    """For costs only, the sizes hold for no batch: every expert is chosen equally often, and this rank's get this
    multiple of the mean. None reads the routing."""
    pads_values: bool = False
    """For costs only: attention is captured as one kernel where a CPU has none (`graph.capture_overrides`)."""
    fused: frozenset[str] = frozenset()
    """For costs only: phases whose memory-bound operators are priced as fused kernels (`graph.operator_costs`)."""
    sums_in_products: bool = False
    """For costs only: a product adds its gradient into the sum over micro-batches, which is then read and written, and
    no gradient besides."""
    recomputes_whole: bool = False
    """For costs only: what computes a layer again runs all of its forward pass (`estimate.stage_price`)."""
    report_load: Callable[[Tensor], None] | None = None
    """Is given this rank's expert load, fp32 [1], before each exchange of rows, and before there is memory for them. It
    may be a collective: every rank of the mesh comes to it."""
    recompute_in_graph: bool = False
    """Layers that the strategy recomputes are computed once: the graph that is captured computes them again, each
    operator as late as possible and only what is needed (`graph.recompute`). Else autograd does."""
    skipped: frozenset[str] = frozenset()
    """The layers that a capture leaves out, by name (`shard.layer_kinds`)."""
    even_sizes: dict[Any, Even] | None = None
    """A capture's record of what the sizes that depend on the data are likely to be; written by
    `dynamic_sizes.expected`."""

    def runs(self, module: str) -> bool:
        """Whether a module of this name is in none of the layers that are skipped."""
        return not any(module.startswith(f"{layer}.") for layer in self.skipped)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, this is `current_step()`, in this thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[StepContext] = ContextVar("step_context", default=StepContext())  # noqa: B039


def current_step() -> StepContext:
    """The context that is installed; all defaults where none is."""
    return _current.get()
