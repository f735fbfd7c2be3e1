"""A lower bound of the makespan of a pipeline step under memory caps.

For one placement of the stages, with head(s) the earliest start of stage s, turn(s) the least time from the end of its
forward pass to the start of the same micro-batch's backward pass, tail(s) the least time from the end of its backward
pass (the INPUT half) to the end of the step, and k micro-batches that fit into the rank's memory, each of these is a
bound (M micro-batches, seconds F, I, W):

- **path**: one micro-batch, head + F + turn + I + tail; M transfers over one border, one after another. (`_paths`)
- **cycles**: of k slots in memory one serves ⌈M / k⌉ micro-batches, each for F + turn + I + W at least; and where a
  rank has several stages, its memory times the time it has is no less than what all micro-batches hold, each for that
  long. (`_cycles`)
- **load**: a rank's work and the time in which it must be idle. Before its first backward pass can begin it runs
  forward passes only, k of them. Between its last forward pass and the backward pass of the same micro-batch it runs
  the backward passes of k − 1 others only, and after its last INPUT half weight halves only, of k. No stage has more
  micro-batches in flight than a stage before it lets through. (`_load`)

Machine-load and path bounds are those of flow shops (Lageweg, Lenstra, Rinnooy Kan, *A General Bounding Scheme for the
Permutation Flow-Shop Problem*, Operations Research 26(1), 1978); what memory adds is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.schedule.costs import Costs
from hyper_parallel.schedule.timing import BACKWARD, FORWARD, INPUT, WEIGHT, durations


def makespan_bound(
    costs: Costs, placement: Sequence[int], micro_batches: int, caps: Sequence[float] | None = None
) -> float:
    """No schedule with this placement takes less, whether it splits backward passes or not.

    `caps`: by rank, in the unit of `Costs.saved`; no limit when left out.
    """
    ranks = max(placement) + 1
    limits = [math.inf] * ranks if caps is None else list(caps)
    return _Instance.build(costs, placement, micro_batches, limits).bound()


@dataclass(frozen=True)
class _Instance:
    """Seconds of each stage's passes, and the paths between them.

    A backward pass that may be split or not counts with the shorter of both in each place: I as the shorter of INPUT
    and BACKWARD, and W as what remains of the lesser work.
    """

    placement: tuple[int, ...]
    micro_batches: int
    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    head: tuple[float, ...]
    turn: tuple[float, ...]
    tail: tuple[float, ...]
    border: float
    """The longest path of one micro-batch with all transfers over one of its borders."""
    saved: tuple[float, ...]
    fits: tuple[int, ...]
    """By stage: micro-batches for which its rank has memory."""
    passes: tuple[int, ...]
    """By stage: micro-batches that can be between its forward and its backward pass, in its own memory and in that of
    the stages before, which hold them too."""
    caps: tuple[float, ...]

    @classmethod
    def build(
        cls, costs: Costs, placement: Sequence[int], micro_batches: int, caps: Sequence[float]
    ) -> _Instance:
        stages = costs.stages
        seconds, delays = durations(costs, placement)

        def of(kind: int) -> list[float]:
            return seconds[kind * stages : (kind + 1) * stages]

        forward, whole = of(FORWARD), of(BACKWARD)
        back = [min(pair) for pair in zip(whole, of(INPUT), strict=True)]
        work = [min(b, i + w) for b, i, w in zip(whole, of(INPUT), of(WEIGHT), strict=True)]
        weight = [max(0.0, total - first) for total, first in zip(work, back, strict=True)]
        head, turn, tail = [0.0] * stages, [0.0] * stages, [0.0] * stages
        tail[0] = weight[0]
        for s in range(1, stages):
            head[s] = head[s - 1] + forward[s - 1] + delays[s - 1]
            tail[s] = max(weight[s], delays[stages + s] + back[s - 1] + tail[s - 1])
        for s in reversed(range(stages - 1)):
            turn[s] = delays[s] + forward[s + 1] + turn[s + 1] + back[s + 1] + delays[stages + s + 1]
        longest = 0.0
        for s in range(stages - 1):
            around = head[s] + forward[s] + turn[s] + back[s] + tail[s]
            longest = max(longest, around + (micro_batches - 1) * delays[s])
        # The INPUT half may free something; what is left of a micro-batch then holds until the WEIGHT half.
        saved = [min(s, s - r) if r > 0 else s for s, r in zip(costs.saved, costs.released, strict=True)]
        fits: list[int] = []
        passes: list[int] = []
        for s in range(stages):
            cap = caps[placement[s]]
            own = micro_batches if saved[s] <= 0 or math.isinf(cap) else int(cap * (1 + 1e-9) / saved[s])
            fits.append(max(1, min(own, micro_batches)))
            passes.append(min(fits[s], *passes[-1:]) if passes else fits[s])
        return cls(
            tuple(placement),
            micro_batches,
            tuple(forward),
            tuple(back),
            tuple(weight),
            tuple(head),
            tuple(turn),
            tuple(tail),
            longest,
            tuple(saved),
            tuple(fits),
            tuple(passes),
            tuple(caps),
        )

    def bound(self) -> float:
        """The largest of all bounds."""
        ranks = range(len(self.caps))
        return max(self._paths(), self._cycles(), *(self._load(rank) for rank in ranks))

    def _paths(self) -> float:
        return max(self.border, self.forward[0] + self.turn[0] + self.input[0] + self.tail[0])

    def _cycles(self) -> float:
        longest = 0.0
        for s, fits in enumerate(self.fits):
            life = self.forward[s] + self.turn[s] + self.input[s]
            rounds = math.ceil(self.micro_batches / fits)
            whole = self.head[s] + rounds * life + (rounds - 1) * self.weight[s] + self.tail[s]
            longest = max(longest, whole)
        for rank, cap in enumerate(self.caps):
            own = [s for s, r in enumerate(self.placement) if r == rank]
            if not own or math.isinf(cap):
                continue
            area = sum(
                self.saved[s] * (self.forward[s] + self.turn[s] + self.input[s] + self.weight[s]) for s in own
            )
            room = _usable(cap, [self.saved[s] for s in own], self.micro_batches)
            if room > 0:
                first = min(self.head[s] for s in own)
                longest = max(longest, first + self.micro_batches * area / room)
        return longest

    def _load(self, rank: int) -> float:
        own = [s for s, r in enumerate(self.placement) if r == rank]
        if not own:
            return 0.0
        work = sum(self.forward[s] + self.input[s] + self.weight[s] for s in own)
        idle = self._idle_before(rank, own, work) + self._idle_after(rank, own)
        return self.micro_batches * work + idle

    def _idle_before(self, rank: int, own: Sequence[int], work: float) -> float:
        """Until the first backward pass; as long as not all forward passes can come before it."""
        first = min(self.head[s] for s in own)
        if min(self.passes[s] for s in own) >= self.micro_batches:
            return first
        begins = min(self.head[s] + self.forward[s] + self.turn[s] for s in own)
        idle = max(first, begins - self._most(rank, own, self.forward))
        # A stage before lets no more through until it has freed one.
        for t in range(min(own) + 1):
            if self.fits[t] >= self.micro_batches:
                continue
            freed = self.head[t] + self.forward[t] + self.turn[t] + self.input[t] + self.weight[t]
            idle = max(idle, freed - self.fits[t] * work)
        return idle

    def _idle_after(self, rank: int, own: Sequence[int]) -> float:
        """From the last forward pass on."""
        if len(own) == 1:
            s = own[0]
            back, weight = (self.passes[s] - 1) * self.input[s], self.weight[s]
            waits = max(0.0, self.turn[s] - back - (self.fits[s] - 1) * weight)
            drains = max(0.0, self.tail[s] - self.fits[s] * weight)
            return max(waits + drains, self.turn[s] + self.tail[s] - back - self.fits[s] * weight)
        both = tuple(i + w for i, w in zip(self.input, self.weight, strict=True))
        drains = min(self.tail[s] for s in own)
        ends = min(self.turn[s] + self.input[s] + self.tail[s] for s in own)
        late = min(drains, self._most(rank, own, self.weight))
        return max(0.0, ends - min(self._most(rank, own, both), ends - drains + late))

    def _most(self, rank: int, own: Sequence[int], seconds: Sequence[float]) -> float:
        """Most seconds of actions, one for each micro-batch held, for which the rank has memory."""
        if len(own) == 1:
            return self.passes[own[0]] * seconds[own[0]]
        room, total = self.caps[rank] * (1 + 1e-9), 0.0
        dense = sorted(own, key=lambda s: -seconds[s] / self.saved[s] if self.saved[s] > 0 else -math.inf)
        for s in dense:
            count = float(self.fits[s])
            if self.saved[s] > 0:
                count = min(count, room / self.saved[s])
            total += count * seconds[s]
            room -= count * self.saved[s]
        return total


def _usable(cap: float, saved: Sequence[float], micro_batches: int) -> float:
    """Most of a cap that whole micro-batches of up to two stages can fill; the cap itself for more stages."""
    cap *= 1 + 1e-9
    if len(saved) > 2 or min(saved) <= 0:
        return cap
    first, other = saved[0], saved[-1]
    most = 0.0
    for count in range(min(micro_batches, int(cap / first)) + 1):
        held = count * first
        if len(saved) == 2:
            held += min(micro_batches, int((cap - held) / other)) * other
        most = max(most, held)
    return most
