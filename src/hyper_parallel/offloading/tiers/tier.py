"""Tier interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

TIME_LIMIT = 120.0
"""Seconds after which a wait for a copy gives up."""


class Pending(Protocol):
    """A copy under way."""

    def wait(self) -> float:
        """Let what the caller computes next find the copy over; the seconds that the calling thread was held up.

        On an accelerator the current stream waits where it can, and the thread does not. Raises TierError if the copy
        failed, or if it takes longer than the tier's time limit.
        """

    def done(self) -> bool:
        """Whether it is over, well or badly, without waiting."""

    @property
    def seconds(self) -> float | None:
        """How long it had its link, without what it waited for before; None while it is under way, where it failed, and
        where nobody knows."""


class Tier(Protocol):
    """Copies of storages, by slot. One thread at a time calls it.

    Copies out and copies back each begin in the order in which they were asked for, beside one another and beside the
    compute. Where two copies are about the same bytes of the tier, the later one waits for the earlier one.
    """

    name: str
    capacity: int
    """Bytes that may lie here."""
    align: int
    """Offsets that are given to `reserve` are multiples of this."""

    def reserve(self, sizes: Mapping[int, int], offsets: Mapping[int, int] | None = None) -> None:
        """Have room for these slots (number to bytes), all of it taken now.

        Slots with overlapping `offsets` share memory: what is written to one of them is lost when another is written.
        Without `offsets` they lie one after the other. A later call replaces the slots, waits for copies under way, and
        keeps what lies in slots that stay. Raises TierError, and changes nothing, if there is not enough.
        """

    def begin_write(self, slot: int, x: torch.Tensor) -> Pending:
        """Begin to copy `x`, uint8 [n] on the device, to the slot, which has room for n bytes or more."""

    def begin_read(self, slot: int, x: torch.Tensor) -> Pending:
        """Begin to copy to `x`, uint8 [n] on the device, the n bytes that were last written to the slot."""

    def close(self) -> None:
        """Stop, and give everything back. Calls after the first do nothing."""


@runtime_checkable
class Workplace(Tier, Protocol):
    """A tier whose memory the host can compute on."""

    def begin_work(
        self, what: str, slots: Sequence[int], work: Callable[[Sequence[torch.Tensor]], None]
    ) -> Pending:
        """Begin to run `work` on what lies in slots, uint8 [n] each, in a thread of the host's own.

        Each was written before, and is written by this: copies to them that are under way are waited for, and later
        ones from them wait for the work, as if it were the copy that put there what they hold. Works run in the order
        in which they were asked for. `what`: in words, for messages.
        """

    def in_place(self, slot: int) -> torch.Tensor:
        """What lies in a slot, uint8 [n] of the tier's own memory, to be read until the slot is written or reserved
        again. Waits for the copy that put it there."""
