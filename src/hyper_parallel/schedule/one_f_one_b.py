"""1F1B, and its kin: GPipe, interleaved 1F1B, zero-bubble schedules.

1F1B: one forward pass, one backward pass, with as few micro-batches in flight as the pipeline's depth needs.

Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, arXiv 2006.09503 (PipeDream-Flush), and
*Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, arXiv 2104.04473, section 2.2.1.
Rank r begins with P − r − 1 forward passes, so that it holds at most P − r micro-batches.

Where the forward pass of a micro-batch runs together with the backward pass of another one (`paired`), both need their
inputs at once: neighbours then take turns, unless rank r begins with 2 (P − r − 1) + 1 forward passes. It holds at most
2 (P − r) micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.errors import StrategyError
from hyper_parallel.program.build import Action, Schedule
from hyper_parallel.program.program import TaskKind


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


# GPipe: all forward passes, then all backward passes.
#
# Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, arXiv 1811.06965,
# section 2.3. Backward passes run in the order of the micro-batches, so that gradients are summed in that order.


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """One stage on each rank; all micro-batches are in flight at once. Raises StrategyError for bad sizes."""
    at_least("gpipe", ranks, micro_batches)
    orders = tuple(
        tuple(
            Action(kind, rank, m)
            for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
            for m in range(micro_batches)
        )
        for rank in range(ranks)
    )
    return Schedule("gpipe", tuple(range(ranks)), orders, micro_batches)


# Interleaved 1F1B: several stages (virtual stages) on each rank, stage s on rank s mod P.
#
# Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
# arXiv 2104.04473, section 2.2.2. Micro-batches go through a rank's stages in groups of P.


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


# ZB-H1 and ZB-H2: weight gradients fill the bubbles of 1F1B.
#
# Qi et al., *Zero Bubble Pipeline Parallelism*, arXiv 2401.10241, section 2. The backward pass is split; nothing waits
# for its weight half, so that a rank computes it where it would wait. Both keep rank r's weight gradients behind its
# input gradients by a number that grows with r, so that every rank holds as many micro-batches:
#
# | schedule | forward passes before the first backward | weight halves behind | micro-batches held |
# |---|---|---|---|
# | ZB-H1 | P − r | r | P |
# | ZB-H2 | 2 (P − r) − 1 | 2 r | 2 P − 1 |


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """One stage on each rank, memory of 1F1B's first rank. Raises StrategyError for fewer micro-batches than ranks."""
    return _zero_bubble("zb-h1", ranks, micro_batches, 1)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """One stage on each rank, twice 1F1B's memory. Raises StrategyError for fewer than 2 P − 1 micro-batches."""
    return _zero_bubble("zb-h2", ranks, micro_batches, 2)


def _zero_bubble(name: str, ranks: int, micro_batches: int, depth: int) -> Schedule:
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


def at_least(name: str, ranks: int, micro_batches: int, least_micro_batches: int = 1) -> None:
    """Raise StrategyError for no ranks, or for fewer micro-batches than the schedule needs."""
    if ranks < 1:
        raise StrategyError(f"schedule {name}: {ranks} ranks were given; a pipeline has at least 1")
    if micro_batches < least_micro_batches:
        raise StrategyError(
            f"schedule {name}: {micro_batches} micro-batches on {ranks} ranks are too few; it needs at least "
            f"{least_micro_batches}. Raise their number (train.batch larger, or train.micro_batch smaller), or choose "
            "1f1b, which takes any number"
        )
