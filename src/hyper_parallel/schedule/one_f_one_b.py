"""1F1B: one forward pass, one backward pass, with as few micro-batches in flight as the pipeline's depth needs.

Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, arXiv 2006.09503 (PipeDream-Flush), and
*Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, arXiv 2104.04473, section 2.2.1.
Rank r begins with P − r − 1 forward passes, so that it holds at most P − r micro-batches.

Where the forward pass of a micro-batch runs together with the backward pass of another one (`paired`), both need their
inputs at once: neighbours then take turns, unless rank r begins with 2 (P − r − 1) + 1 forward passes. It holds at most
2 (P − r) micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.schedule import Action, Schedule
from hyper_parallel.schedule.sizes import at_least


def one_f_one_b(ranks: int, micro_batches: int, *, paired: bool = False) -> Schedule:
    """One stage on each rank, backward passes whole. `paired`: with the forward passes that pairs need ahead.

    Raises StrategyError for bad sizes.
    """
    return _build("1f1b", ranks, micro_batches, (TaskKind.BACKWARD,), paired)


def one_f_one_b_split(ranks: int, micro_batches: int, *, paired: bool = False) -> Schedule:
    """1F1B with split backward passes: the input gradient leaves before the weight gradient is computed."""
    return _build("1f1b-split", ranks, micro_batches, (TaskKind.INPUT, TaskKind.WEIGHT), paired)


def _build(
    name: str, ranks: int, micro_batches: int, backward: tuple[TaskKind, ...], paired: bool
) -> Schedule:
    at_least(name, ranks, micro_batches)

    def order(rank: int) -> Iterator[Action]:
        after = ranks - rank - 1
        ahead = min(2 * after + 1 if paired else after, micro_batches)
        for m in range(ahead):
            yield Action(TaskKind.FORWARD, rank, m)
        for m in range(micro_batches):
            if m + ahead < micro_batches:
                yield Action(TaskKind.FORWARD, rank, m + ahead)
            for kind in backward:
                yield Action(kind, rank, m)

    orders = tuple(tuple(order(rank)) for rank in range(ranks))
    return Schedule(name, tuple(range(ranks)), orders, micro_batches)
