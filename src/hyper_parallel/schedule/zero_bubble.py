"""ZB-H1 and ZB-H2: weight gradients fill the bubbles of 1F1B.

Qi et al., *Zero Bubble Pipeline Parallelism*, arXiv 2401.10241, section 2. The backward pass is split; nothing waits
for its weight half, so that a rank computes it where it would wait. Both keep rank r's weight gradients behind its
input gradients by a number that grows with r, so that every rank holds as many micro-batches:

| schedule | forward passes before the first backward | weight halves behind | micro-batches held |
|---|---|---|---|
| ZB-H1 | P − r | r | P |
| ZB-H2 | 2 (P − r) − 1 | 2 r | 2 P − 1 |
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.schedule import Action, Schedule
from hyper_parallel.schedule.sizes import at_least


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """One stage on each rank, memory of 1F1B's first rank. Raises StrategyError for fewer micro-batches than ranks."""
    return _build("zb-h1", ranks, micro_batches, 1)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """One stage on each rank, twice 1F1B's memory. Raises StrategyError for fewer than 2 P − 1 micro-batches."""
    return _build("zb-h2", ranks, micro_batches, 2)


def _build(name: str, ranks: int, micro_batches: int, depth: int) -> Schedule:
    at_least(name, ranks, micro_batches, depth * (ranks - 1) + 1)

    def order(rank: int) -> Iterator[Action]:
        ahead, behind = depth * (ranks - rank - 1), depth * rank
        for m in range(ahead):
            yield Action(TaskKind.FORWARD, rank, m)
        for m in range(micro_batches):
            if m + ahead < micro_batches:
                yield Action(TaskKind.FORWARD, rank, m + ahead)
            yield Action(TaskKind.INPUT, rank, m)
            if m >= behind:
                yield Action(TaskKind.WEIGHT, rank, m - behind)
        for m in range(micro_batches - behind, micro_batches):
            yield Action(TaskKind.WEIGHT, rank, m)

    orders = tuple(tuple(order(rank)) for rank in range(ranks))
    return Schedule(name, tuple(range(ranks)), orders, micro_batches)
