"""Context of a step: everything that its computation depends on and that the model's own code does not pass on.

Whoever computes a step, or captures one, builds a `StepContext` from the one at hand, and installs it around the
computation:

    with replace(current_step(), draw=draw, documents=True).installed():
        loss = model(**inputs)

Hooks and wrappers inside unmodified modules, which take no further argument, read `current_step()`. A context never
changes, so that it can be kept: a layer that is computed again in the backward pass is so under the context that its
forward pass had. Eager steps read it as captured ones do; only what says so below is a capture's alone.

What one part of a forward pass tells a later one of the same pass is no input of the step, and is kept where it is
made: positions split by the decoder (`shard.context.mask`), dropouts counted by module (`shard.functional_dropout`).
Nor is where state rests before the first step (`compat.paged_out_parameters`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from hyper_parallel.graph.ir import Even
    from hyper_parallel.graph.phase import Phase

    # The context carries these two for HyperShard, and looks into neither.
    from hyper_parallel.shard.dropout import Draw
    from hyper_parallel.shard.saved_gathers import SavedGathers


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a part of a step is computed under. Each default is that of a computation that is no part of a step."""

    phase: Phase = "forward"
    """Recorded on each captured node, as is the micro-batch."""
    micro_batch: int | None = None
    """None outside of all: in the step's prologue and epilogue."""
    draw: Draw | None = None
    """What random numbers are a function of; None refuses dropout."""
    gathers: SavedGathers | None = None
    """Weights and gradient sums kept between the micro-batches of the step; None keeps nothing."""
    documents: bool | None = None
    """Whether rows hold several packed documents; None looks at the values of position_ids."""
    expert_rows: int = 1
    """Rows of each expert are filled up to a multiple of this: a product of few rows adds up in another order, and a
    generated token must not depend on how many tokens of other requests an expert gets."""
    widest_spread: bool = False
    """For the memory of a pass only: experts get as many rows, and as many of filling, as any choice can give them."""
    even_load: float | None = None
    """For costs only, the sizes hold for no batch: every expert is chosen equally often, and this rank's get so many
    times the mean. None reads the routing."""
    pads_values: bool = False
    """For costs only: attention is captured as one kernel where a CPU has none (`graph.fused_attention`)."""
    fused: frozenset[str] = frozenset()
    """For costs only: phases whose memory-bound operators are priced as fused kernels (`graph.fused_costs`)."""
    sums_in_products: bool = False
    """For costs only: a product adds its gradient into the sum over micro-batches, which is then read and written, and
    no gradient besides."""
    recomputes_whole: bool = False
    """For costs only: what computes a layer again runs all of its forward pass (`estimate.whole_recompute`)."""
    report_load: Callable[[Tensor], None] | None = None
    """Is given this rank's expert load, fp32 [1], before each exchange of rows, and before there is memory for them. It
    may be a collective: every rank of the mesh comes to it."""
    recompute_in_graph: bool = False
    """Layers that the strategy recomputes are computed once: the graph that is captured computes them again, each
    operator as late as possible and only what is needed (`graph.recompute`). Else autograd does."""
    skipped: frozenset[str] = frozenset()
    """The layers that a capture leaves out, by name (`shard.skipped_layers`)."""
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
