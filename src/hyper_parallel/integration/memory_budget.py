"""Memory budgets inside another trainer: `memory.device`, or swapped activations.

The optimizer and the loop are the trainer's, so what a budget covers is what `hp.offload` covers: both passes, with all
that is held beside them. Rows are padded to few lengths (`few_lengths`), since each has a plan.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hyper_parallel.errors import BudgetError, IntegrationError
from hyper_parallel.integration.parallel_run import ParallelRun
from hyper_parallel.offloading.autograd import Swap, offload
from hyper_parallel.offloading.autograd.parallel_context import agreed
from hyper_parallel.proc import MEMORY, bytes_in
from hyper_parallel.shard import ShardedModel
from hyper_parallel.strategy import Memory, Strategy
from hyper_parallel.units import format_bytes

log = logging.getLogger(__name__)


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
        self._told = 0

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Inside, the error of a budget that is too small names the arguments of a Trainer."""
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


def _share_of_host() -> int:
    free = bytes_in(MEMORY, "MemAvailable")
    if free is None:
        raise IntegrationError(
            "activation_mode 'swap' needs to know how much of the host's memory is free, which this system does not "
            "say; give memory: {device: …, host: …} instead"
        )
    return max(1, free // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
