"""1F1B: one forward pass, one backward pass, with as few micro-batches in flight as the pipeline's depth needs.

Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, arXiv 2006.09503 (PipeDream-Flush), and
*Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, arXiv 2104.04473, section 2.2.1.
Rank r begins with P − r − 1 forward passes, so that it holds at most P − r micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.schedule import Action, Schedule
from hyper_parallel.schedule.sizes import at_least


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """One stage on each rank, backward passes whole. Raises StrategyError for bad sizes."""
    return _build("1f1b", ranks, micro_batches, (TaskKind.BACKWARD,))


def one_f_one_b_split(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with split backward passes: the input gradient leaves before the weight gradient is computed."""
    return _build("1f1b-split", ranks, micro_batches, (TaskKind.INPUT, TaskKind.WEIGHT))


def _build(name: str, ranks: int, micro_batches: int, backward: tuple[TaskKind, ...]) -> Schedule:
    at_least(name, ranks, micro_batches)

    def order(rank: int) -> Iterator[Action]:
        ahead = min(ranks - rank - 1, micro_batches)
        for m in range(ahead):
            yield Action(TaskKind.FORWARD, rank, m)
        for m in range(micro_batches):
            if m + ahead < micro_batches:
                yield Action(TaskKind.FORWARD, rank, m + ahead)
            for kind in backward:
                yield Action(kind, rank, m)

    orders = tuple(tuple(order(rank)) for rank in range(ranks))
    return Schedule(name, tuple(range(ranks)), orders, micro_batches)
