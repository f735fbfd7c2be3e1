"""Updates on the host at places fixed by hand: what a planner's moves amount to, without one."""

from __future__ import annotations

from typing import Any

from torch import fx

from hyper_parallel.graph import Slot, StepGraph, ir, validate, values_of
from hyper_parallel.graph.host_nodes import is_update, storages_of
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.step_context import Region


def placed(step: StepGraph, tier: str = "host") -> StepGraph:
    """The step with each gradient stored behind its last use, and each parameter fetched right before its first."""
    made = step.copy()
    nodes = list(made.nodes)
    names = {value.storage: node for node in reversed(list(made.graph.nodes)) for value in values_of(node)}
    slots: dict[int, Slot] = {}
    for node in [node for node in nodes if is_update(node)]:
        master, gradient, *state = storages_of(node)
        uses = {storage: [one for one in nodes if storage in touched(one)] for storage in (master, gradient)}
        number = {storage: len(slots) + at for at, storage in enumerate((master, gradient, *state))}
        for storage, slot in number.items():
            count = made.storages[storage].bytes
            slots[slot] = Slot(storage, tier, count, "step" if storage == gradient else "away", 0, len(nodes))
        arguments: Any = (*node.args[:3], tuple(number.values()), tier)
        node.args = arguments

        def put(operator: Any, storage: int, before: fx.Node, number: dict[int, int] = number) -> None:
            with made.graph.inserting_before(before):
                moved = made.graph.call_function(operator, (names[storage], number[storage], tier))
            moved.meta = {"region": Region("", None, "optimizer"), "module": "", "recomputed": False}

        first, last = uses[master][0], uses[master][-1]
        put(ir.prefetch, master, first)
        put(ir.wait, master, first)
        put(ir.detach, master, last.next)
        # Behind the last use or, of a gradient that nothing but the update looks at, behind what made it.
        behind = [*uses[gradient], names[gradient]][-1 if not uses[gradient] else len(uses[gradient]) - 1]
        put(ir.store, gradient, behind.next)
        put(ir.wait, gradient, node)
        put(ir.detach, gradient, node)
    made.slots = slots
    validate(step, made)
    return made
