"""Memory budgets inside another trainer: `memory.device`, or swapped activations.

The optimizer and the loop are the trainer's, so what a budget covers is what `hp.offload` covers: both passes, with all
that is held beside them. Plans are made for shapes, and rows of a trainer have many lengths. So all ranks pad to the
longest row of any of them, and further, to one of few lengths:

    known length if one is at least n and at most 1.5 · n, else the next of 2^k and 1.5 · 2^k;
    once MOST lengths are known, the least of them that is at least n

The first length is taken as it is: rows that are all of one length are not padded.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hyper_parallel.errors import BudgetError, IntegrationError
from hyper_parallel.integration.parallel_run import ParallelRun
from hyper_parallel.offloading.autograd import Swap, offload
from hyper_parallel.offloading.autograd.rank_agreement import agreed
from hyper_parallel.offloading.tiers.host import available
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.row_length import length_multiple
from hyper_parallel.strategy import Memory, Strategy
from hyper_parallel.units import format_bytes

log = logging.getLogger(__name__)

MOST = 8
"""Lengths from which on no shorter one is added."""


def has_budget(strategy: Strategy, swap: Swap | None = None) -> bool:
    """Whether a model spread so runs under a budget, for which it is spread in the traceable lowering."""
    return strategy.memory.device is not None or swap is not None


def check_budget(memory: Memory, swap: Swap | None = None) -> None:
    """Refuse what a budget under another trainer cannot honour. Raises IntegrationError."""
    if memory.device is not None and swap is not None:
        raise IntegrationError(
            "memory.device is a budget, and so is activation_mode 'swap'; keep one of them"
        )
    if memory.pool is not None:
        raise IntegrationError(
            "memory.pool is memory of all ranks together, which hyper-parallel train divides among them; under another "
            "trainer give each its own: memory.host"
        )
    if memory.update == "host":
        raise IntegrationError(
            "memory.update: host runs our own optimizer beside the device, and the optimizer is the trainer's; leave "
            "it out"
        )


def under_budget(spread: ParallelRun, swap: Swap | None = None) -> Budget:
    """Run the model's passes within `memory.device` of its strategy, or with its activations swapped; a collective.

    Raises IntegrationError, BudgetError, TierError.
    """
    handle, memory = spread.handle, spread.handle.strategy.memory
    check_budget(memory, swap)
    if memory.device is not None:
        offload(handle.model, budget=memory.device, host=memory.host, flash=memory.flash)
    else:
        assert swap is not None, "a budget"
        layers = swap.layers or handle.plan.layers
        # Each rank of a machine may take its part of what is free before any of them takes some.
        host = agreed(handle, _share_of_host)
        offload(handle.model, budget=Swap(swap.inputs, layers), host=host)
    return Budget(handle)


class Budget:
    """The passes of a spread model, which run by plans."""

    def __init__(self, handle: ShardedModel) -> None:
        self._handle = handle
        self._lengths: list[int] = []
        self._told = 0

    def length(self, longest: int) -> int:
        """To how many positions rows of at most `longest` are padded now, the same on every rank; a collective.

        A multiple of what the axes can divide.
        """
        told = torch.tensor([longest], dtype=torch.int64, device=self._handle.device)
        wanted = int(self._handle.all_reduce(told, self._handle.mesh.names, "max"))
        found = length_of(wanted, self._lengths, length_multiple(self._handle.plan))
        if found not in self._lengths:
            self._lengths.append(found)
        return found

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Inside, a budget that is too small is told in the words of who trains by arguments."""
        try:
            yield
        except BudgetError as error:
            least = "" if error.floor is None else f"; all workers need {format_bytes(error.floor)} at least"
            raise BudgetError(
                f"memory.device: {error.why}{least}; set it higher, give it more memory beside the device "
                "(memory.host, memory.flash), or lower per_device_train_batch_size",
                error.why,
                error.floor,
            ) from error

    def tell(self) -> None:
        """Say, on rank 0, what plans were made since this was called the last time."""
        forward: Any = self._handle.model.forward
        notes: Sequence[str] = forward.notes
        for note in notes[self._told :]:
            if self._handle.rank == 0:
                # A warning, though it warns of nothing: a notice that is seen in logs that nobody configured.
                log.warning("hyper_parallel planned the model's passes: %s", note)
        self._told = len(notes)


def length_of(wanted: int, known: Sequence[int], multiple: int = 1) -> int:
    """The module's rule, for `wanted` positions when these lengths are `known`; a multiple of `multiple`."""
    rounded = -(-wanted // multiple) * multiple
    fits = [length for length in known if length >= rounded]
    if fits and (min(fits) <= 1.5 * rounded or len(known) >= MOST):
        return min(fits)
    if not known:
        return rounded
    power = 1 << (rounded - 1).bit_length()
    step = power * 3 // 4 if rounded <= power * 3 // 4 else power
    return -(-step // multiple) * multiple


def _share_of_host() -> int:
    free = available()
    if free is None:
        raise IntegrationError(
            "activation_mode 'swap' needs to know how much of the host's memory is free, which this system does not "
            "say; give memory: {device: …, host: …} instead"
        )
    return max(1, free // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
