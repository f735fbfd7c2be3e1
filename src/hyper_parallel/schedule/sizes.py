"""Checks of the sizes of named schedules: ranks and micro-batches."""

from __future__ import annotations

from hyper_parallel.errors import StrategyError


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
