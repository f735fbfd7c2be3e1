"""Gradient sums: the values at which a step is cut into what each micro-batch computes, and what runs once.

A captured micro-batch returns each gradient as it is after all reductions, and the values at which reductions could be
cut off: ``gradient.unreduced:<n>`` before the reduction over shards, ``gradient.unsummed:<n>`` before the sum over
copies. A value may be added up over micro-batches if what is computed from it until the gradient is linear, which
reductions are, and if nothing else goes into that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from hyper_parallel.graph.data_flow import Needs, needed, seen_through, sources, stops

GRADIENT = "gradient."
"""How the outputs that are gradients begin."""
UNREDUCED, UNSUMMED = f"{GRADIENT}unreduced:", f"{GRADIENT}unsummed:"
"""How gradients begin that are not reduced over shards, or not summed over copies."""


@dataclass(frozen=True)
class GradientSums:
    """What is added up over the micro-batches of a step."""

    sums: Mapping[str, fx.Node]
    """Gradients before reductions that run once a step, by name."""
    reduced: Mapping[str, tuple[fx.Node, ...]]
    """Parameter to the parts of its gradient, each computed from `sums` alone. Others are added up as they are."""


def gradient_sums(
    returned: Mapping[str, fx.Node],
    parts: Mapping[str, Sequence[fx.Node]],
    needs: Needs,
    early: Callable[[str], bool],
) -> GradientSums:
    """The cut of a micro-batch that returns these values.

    `parts`: of each gradient, the summands that are to be kept apart; `needs`: the data flow; `early`: whether the
    reduction over shards of an unreduced gradient runs once a step too.
    """
    found = {
        name: seen_through(node)
        for name, node in returned.items()
        if name.startswith(UNREDUCED) and early(name)
    }
    behind = _behind(found.values())
    found |= {
        name: seen_through(node)
        for name, node in returned.items()
        if name.startswith(UNSUMMED) and node not in behind
    }
    ends = set(found.values())
    stop = stops(needs, ends)
    reduced = {
        name.removeprefix(GRADIENT): tuple(nodes)
        for name, nodes in parts.items()
        if name.startswith(GRADIENT)
        and not name.startswith((UNREDUCED, UNSUMMED))
        and all(_only_reduces(needs, part, ends, stop) for part in nodes)
    }
    flat = [part for nodes in reduced.values() for part in nodes]
    used = sources(needed(needs, flat, stop)) | set(flat)
    return GradientSums({name: node for name, node in found.items() if node in used}, reduced)


def _behind(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes and what is computed from them."""
    found, left = set(nodes), list(nodes)
    while left:
        more = [user for user in left.pop().users if user not in found]
        found.update(more)
        left += more
    return found


def _only_reduces(needs: Needs, part: fx.Node, ends: set[fx.Node], stop: Collection[fx.Node]) -> bool:
    """Whether a part of a gradient is computed from the ends alone."""
    if part in ends:
        return True
    left, seen, met = [part], {part}, False
    while left:
        node = left.pop()
        for source in node.all_input_nodes:
            met = met or source in ends
            # Nearly all parts that are no reductions come to a weight or the batch soon.
            if source not in ends and source not in stop and source not in needs:
                return False
        more = [source for source in needs[node] if source not in stop and source not in seen]
        seen.update(more)
        left += more
    return met
