"""Micro-batches of several kinds in one step: what each costs, on which ranks, and what waits for what.

Rows of multimodal data are unlike: some have many images, some none. Micro-batches of a kind are alike; they have
stages of their own, at most one on each rank, whose data flow need not be a chain: two encoders feed one language model
and do not wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyper_parallel.errors import StrategyError
from hyper_parallel.program.build import Action, Schedule
from hyper_parallel.program.program import TaskKind
from hyper_parallel.schedule.costs import Costs

Edges = Mapping[tuple[int, int], float]
"""(stage that gives, stage that takes) to the seconds of the transfer."""


@dataclass(frozen=True)
class MicroBatchKind:
    """Micro-batches that are alike."""

    costs: Costs
    """By stage; its transfers do not count."""
    placement: tuple[int, ...]
    """Stage to the rank of the schedule that it lies on, each on another."""
    forward: Edges
    """Values that a forward pass gives to later stages."""
    backward: Edges
    """Gradients that a backward pass gives to earlier stages."""
    count: int = 1
    """Of such micro-batches in the step."""

    def __post_init__(self) -> None:
        if len(self.placement) != self.costs.stages or len({*self.placement}) != self.costs.stages:
            raise StrategyError(
                f"a kind of micro-batches has {self.costs.stages} stages on the ranks {list(self.placement)}; each "
                "needs a rank of its own"
            )
        for edges, ahead in ((self.forward, True), (self.backward, False)):
            for source, target in edges:
                if not (0 <= source < self.costs.stages and 0 <= target < self.costs.stages) or (
                    (source < target) is not ahead
                ):
                    raise StrategyError(
                        f"a kind of micro-batches has values from stage {source} to stage {target}: forward passes "
                        "give to later stages, and backward passes to earlier ones"
                    )

    @classmethod
    def chain(cls, costs: Costs, placement: Sequence[int], count: int = 1) -> MicroBatchKind:
        """Stages of a pipeline: each feeds the next one."""
        borders = list(enumerate(costs.transfers))
        return cls(
            costs,
            tuple(placement),
            {(one, one + 1): seconds for one, seconds in borders},
            {(one + 1, one): seconds for one, seconds in borders},
            count,
        )

    def work(self, stage: int) -> float:
        """Seconds of a stage's passes over one micro-batch."""
        return self.costs.forward[stage] + self.costs.input[stage] + self.costs.weight[stage]


@dataclass(frozen=True)
class StepTables:
    """A step's micro-batches, numbered kind by kind, in tables by rank and micro-batch."""

    kinds: Sequence[MicroBatchKind]
    ranks: int
    kind_of: list[int] = field(init=False)
    """By micro-batch."""
    stage: list[list[int]] = field(init=False)
    """[rank][micro-batch]: the stage, of its kind; −1 where it has none there."""
    first_stage: list[int] = field(init=False)
    """By kind: the number of its first stage among the stages of all kinds."""

    def __post_init__(self) -> None:
        kind_of = [number for number, kind in enumerate(self.kinds) for _ in range(kind.count)]
        stage = [[-1] * len(kind_of) for _ in range(self.ranks)]
        for micro_batch, number in enumerate(kind_of):
            for own, rank in enumerate(self.kinds[number].placement):
                stage[rank][micro_batch] = own
        first = [0]
        for kind in self.kinds:
            first.append(first[-1] + kind.costs.stages)
        for name, value in (("kind_of", kind_of), ("stage", stage), ("first_stage", first)):
            object.__setattr__(self, name, value)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the step."""
        return len(self.kind_of)

    @property
    def placement(self) -> tuple[int, ...]:
        """Ranks of the stages of all kinds."""
        return tuple(rank for kind in self.kinds for rank in kind.placement)

    def kind(self, micro_batch: int) -> MicroBatchKind:
        """The kind of a micro-batch."""
        return self.kinds[self.kind_of[micro_batch]]

    def bound(self) -> float:
        """No order of these actions ends sooner: a rank's work, the shortest way to its first action, and the shortest
        way from its last input gradients, during which it may compute gradients of weights; or one micro-batch alone.
        """
        heads, tails = [math.inf] * self.ranks, [math.inf] * self.ranks
        work, weights, longest = [0.0] * self.ranks, [0.0] * self.ranks, 0.0
        for kind in self.kinds:
            into, out = way_in(kind), _way_out(kind)
            costs = kind.costs
            for stage, rank in enumerate(kind.placement):
                work[rank] += kind.count * kind.work(stage)
                weights[rank] += kind.count * costs.weight[stage]
                heads[rank], tails[rank] = min(heads[rank], into[stage]), min(tails[rank], out[stage])
                longest = max(longest, into[stage] + costs.forward[stage] + costs.input[stage] + out[stage])
        return max(
            longest,
            *(
                one + heads[rank] + max(0.0, tails[rank] - weights[rank])
                for rank, one in enumerate(work)
                if heads[rank] < math.inf
            ),
        )

    def caps_of_1f1b(self) -> list[float]:
        """The memory that each rank may hold: as much as the fullest one if the stage that is n stages before the last
        one holds the n + 1 micro-batches that save most."""
        fullest = 0.0
        for rank in range(self.ranks):
            held, depth = [], 0
            for kind in self.kinds:
                if rank in kind.placement:
                    stage = kind.placement.index(rank)
                    depth = max(depth, kind.costs.stages - stage)
                    held += [kind.costs.saved[stage] + max(0.0, -kind.costs.released[stage])] * kind.count
            fullest = max(fullest, sum(sorted(held, reverse=True)[:depth]))
        return [fullest] * self.ranks


def way_in(kind: MicroBatchKind) -> list[float]:
    """By stage: seconds before its forward pass can begin, on the way of one micro-batch alone."""
    into = [0.0] * kind.costs.stages
    for (source, target), seconds in sorted(kind.forward.items(), key=lambda one: one[0][1]):
        into[target] = max(into[target], into[source] + kind.costs.forward[source] + seconds)
    return into


def _way_out(kind: MicroBatchKind) -> list[float]:
    """By stage: seconds from the end of its input gradients until the gradients of its weights, and all of earlier
    stages, have been computed."""
    out = list(kind.costs.weight)
    for (source, target), seconds in sorted(kind.backward.items(), key=lambda one: one[0][0]):
        out[source] = max(out[source], seconds + kind.costs.input[target] + out[target])
    return out


# Forward passes alone: evaluation. Each rank runs all micro-batches of one of its stages before those of the next.
#
# Each micro-batch is ended by a backward pass that computes nothing.


def forward_only(kinds: Sequence[tuple[Sequence[int], int]], ranks: int) -> Schedule:
    """The order of forward passes alone. `kinds`: the ranks of the stages, and the number of micro-batches, of each
    kind; both are numbered kind by kind, as `step_schedule` does."""
    passes: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    placement: list[int] = []
    first = 0
    for stages, count in kinds:
        for rank in stages:
            passes[rank] += [(len(placement), m) for m in range(first, first + count)]
            placement.append(rank)
        first += count
    orders = (
        (
            *(Action(TaskKind.FORWARD, stage, m) for stage, m in mine),
            *(
                Action(TaskKind.BACKWARD, stage, m)
                for stage, m in sorted(mine, key=lambda one: (-one[0], one[1]))
            ),
        )
        for mine in passes
    )
    return Schedule("forward-only", tuple(placement), tuple(orders), first)
