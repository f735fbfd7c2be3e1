"""Sizes of transfers: what crosses from one device group to another for a port's value, and between which ranks.

Between equal meshes each rank sends all that it has to the rank with its place in the other group. Between unlike ones
the resharding plan says which boxes go where (`program.reshard`); all boxes from one rank to another are one message.
The rank with most to send or to receive decides how long that takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hyper_parallel.program.program import Program, TaskKind
from hyper_parallel.program.reshard import Buffer, plan_reshard
from hyper_parallel.workload.work import bytes_of

Slowest = Callable[[Sequence[tuple[int, ...]]], tuple[int, ...]]
"""Of groups of ranks that do the same at the same time, the one that decides how long it takes."""


@dataclass(frozen=True)
class Transfer:
    """A port's value on its way to a group, between the busiest ranks."""

    ends: tuple[int, int]
    sent: int
    """Bytes from the one to the other."""
    taken: int
    """Bytes of the value on a rank that takes it."""
    exchanged: int
    """Bytes that a rank gives its fellows afterwards, where each of them has received a part of a copy."""


class Transfers:
    """What crosses between the device groups."""

    def __init__(self, program: Program, sizes: Mapping[str, int], slowest: Slowest | None = None) -> None:
        """`sizes`, `slowest`: as of `program.expand.expand`."""
        self._program, self._sizes, self._slowest = program, sizes, slowest
        self._kinds = {port: task.kind for task in program.tasks.values() for port in task.gives}
        self.to = cache(self._to)
        """(port, receiving group) to the transfer."""

    def is_forward(self, port: str) -> bool:
        """Whether a forward task gives the port's value."""
        return self._kinds[port] is TaskKind.FORWARD

    def _to(self, port: str, group: str) -> Transfer:
        one = self._program.ports[port]
        source, target = self._program.groups[one.group], self._program.groups[group]
        layout, width = one.layout_in(group), bytes_of(one.dtype)
        taken = width * math.prod(layout.local_shape(target.mesh.coordinate(0)))
        if not one.received:
            # Each rank sends all that it has to the rank with its place in the other group's mesh.
            taken = self._sizes.get(port, taken)
            pairs = list(zip(source.ranks, target.ranks, strict=True))
            first, second = pairs[0] if self._slowest is None else self._slowest(pairs)
            return Transfer((first, second), taken, taken, 0)
        messages: dict[Buffer, Counter[tuple[int, int]]] = {reads: Counter() for reads in Buffer}
        for phase in plan_reshard(source, one.layout, target, layout).phases:
            for box in phase.transfers:
                if box.sender != box.receiver:
                    messages[phase.reads][box.sender, box.receiver] += width * box.elements
        crossing, inside = messages[Buffer.SOURCE], messages[Buffer.TARGET]
        if not crossing:
            return Transfer((source.ranks[0], target.ranks[0]), 0, taken, 0)
        rank, sent = max(
            (_through(crossing, end).most_common(1)[0] for end in (0, 1)), key=lambda one: one[1]
        )
        ends = max((pair for pair in crossing if rank in pair), key=lambda pair: crossing[pair])
        return Transfer(ends, sent, taken, max(_through(inside, 0).values(), default=0))


def _through(messages: Counter[tuple[int, int]], end: int) -> Counter[int]:
    """Bytes by the rank at one end."""
    found: Counter[int] = Counter()
    for pair, count in messages.items():
        found[pair[end]] += count
    return found
