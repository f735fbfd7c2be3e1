"""Order of moves when slots of a memory swap places within it.

Piece i may be copied once every piece whose bytes it would write over has been. What waits in a circle is broken by
copying one piece, the smallest, aside first.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Shift:
    """`bytes` from one place to another; neither the sources nor the targets of several overlap."""

    source: int
    target: int
    bytes: int


Step = tuple[Literal["copy", "aside", "back"], Shift]
"""`copy`: to its target, with which its source may overlap. `aside`: out of the way, and `back`: from there."""


def ordered(shifts: Sequence[Shift]) -> list[Step]:
    """Steps after which every piece is at its target."""
    moving = sorted(
        (one for one in shifts if one.source != one.target and one.bytes), key=lambda one: one.source
    )
    ends = [one.source + one.bytes for one in moving]
    blocks: dict[int, list[int]] = defaultdict(list)
    blockers = [0] * len(moving)
    for index, one in enumerate(moving):
        at = bisect.bisect_right(ends, one.target)
        while at < len(moving) and moving[at].source < one.target + one.bytes:
            if at != index:
                blocks[at].append(index)
                blockers[index] += 1
            at += 1
    steps: list[Step] = []
    backs: list[Step] = []
    free = [index for index, count in enumerate(blockers) if not count]
    left = set(range(len(moving)))

    def gone(index: int) -> None:
        left.discard(index)
        for blocked in blocks[index]:
            blockers[blocked] -= 1
            if not blockers[blocked] and blocked in left:
                free.append(blocked)

    while left:
        if free:
            index = free.pop()
            steps.append(("copy", moving[index]))
        else:
            index = min(left, key=lambda one: (moving[one].bytes, one))
            steps.append(("aside", moving[index]))
            backs.append(("back", moving[index]))
        gone(index)
    return steps + backs
