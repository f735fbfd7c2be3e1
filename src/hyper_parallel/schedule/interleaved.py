"""Interleaved 1F1B: several stages (virtual stages) on each rank, stage s on rank s mod P.

Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
arXiv 2104.04473, section 2.2.2. Micro-batches go through a rank's stages in groups of P.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.errors import StrategyError
from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.schedule import Action, Schedule
from hyper_parallel.schedule.sizes import at_least


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """`stages_per_rank` stages on each rank, backward passes whole.

    Raises StrategyError for fewer than two stages on a rank, and for micro-batches that the ranks do not divide.
    """
    name = "interleaved-1f1b"
    at_least(name, ranks, micro_batches)
    if stages_per_rank < 2:
        raise StrategyError(
            f"schedule {name}: {stages_per_rank} stages on each rank; it interleaves at least 2. "
            "With one stage on each rank, choose 1f1b"
        )
    if micro_batches % ranks:
        more = micro_batches + ranks - micro_batches % ranks
        raise StrategyError(
            f"schedule {name}: {micro_batches} micro-batches are not a multiple of the {ranks} ranks; "
            f"take {more} micro-batches (by train.batch and train.micro_batch), or another schedule"
        )
    total = micro_batches * stages_per_rank
    group = ranks * stages_per_rank

    def order(rank: int) -> Iterator[Action]:
        def forward(k: int) -> Action:
            part = k // ranks % stages_per_rank
            return Action(TaskKind.FORWARD, part * ranks + rank, k // group * ranks + k % ranks)

        def backward(k: int) -> Action:
            part = stages_per_rank - 1 - k // ranks % stages_per_rank
            return Action(TaskKind.BACKWARD, part * ranks + rank, k // group * ranks + k % ranks)

        ahead = min(total, 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks)
        for k in range(ahead):
            yield forward(k)
        for k in range(total):
            if k + ahead < total:
                yield forward(k + ahead)
            yield backward(k)

    orders = tuple(tuple(order(rank)) for rank in range(ranks))
    return Schedule(name, tuple(s % ranks for s in range(group)), orders, micro_batches)
