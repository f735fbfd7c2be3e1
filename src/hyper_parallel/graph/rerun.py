"""Whether a run of a graph that stopped can begin again: nothing that it was given may have been changed by then."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from hyper_parallel.graph.accumulate import Accumulation, when_of
from hyper_parallel.graph.ir import StepGraph
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.tier_ops import is_cache


def changed_input(
    step: StepGraph, stops: Collection[fx.Node], loop: Accumulation | None = None
) -> str | None:
    """The name of an input that a run may have written to when it stops at or in one of the nodes `stops`; None where
    there is none. `loop`: the loop whose body `step` is; its totals are zero before each run, and are no inputs.
    """
    nodes = list(step.nodes)
    last = max((at for at, node in enumerate(nodes) if node in stops), default=-1)
    # The body's end has run before whatever runs in its second micro-batch.
    repeats = loop is not None and any(when_of(node) != "first" for node in stops)
    totals = loop.totals if loop is not None else ()
    outside = {storage: one.name for storage, one in step.outside.items() if one.name not in totals}
    for at, node in enumerate(nodes):
        before = at <= last or (repeats and when_of(node) != "last")
        if before and not is_cache(node) and (changed := outside.keys() & writes(node)):
            return outside[min(changed)]
    return None
