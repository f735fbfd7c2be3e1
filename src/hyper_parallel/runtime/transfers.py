"""Point-to-point transfers of one rank: receives posted ahead, sends that hold their buffer.

The k-th send from a rank to another meets that rank's k-th receive, on every backend; tags are not used, since NCCL and
HCCL have none. A channel can be given a communicator of its own, so that what goes forward and what comes back do not
hold each other up; without one, all share the default process group, which gloo can and NCCL cannot.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.errors import FollowsError, HyperParallelError

Channel = tuple[int, int]
"""Sending and receiving rank of the run."""


class TransferError(FollowsError):
    """A transfer did not end within its deadline, or the other rank is gone: what that rank says explains it."""


@dataclass(frozen=True)
class _Pending:
    """A transfer under way, and the memory that it uses."""

    work: dist.Work
    buffer: Tensor


class Transfers(Protocol):
    """The transfers of one rank. A key names a transfer: its port, micro-batch and the group at the other end."""

    def post(
        self, key: Hashable, source: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Post the receive of `count` elements, [count], from a rank; the memory that they come to. `wait` gives it."""

    def send(self, key: Hashable, target: int, value: Tensor) -> None:
        """Begin to send a flat tensor; it stays as it is until `wait`."""

    def wait(self, key: Hashable) -> Tensor:
        """Wait for a transfer: what was received, or what was sent, whose memory is free now.

        Raises TransferError when it has not ended within the deadline.
        """

    def drain(self) -> None:
        """Wait for the sends that nobody waited for, at the end of a step."""


class ProcessTransfers:
    """Transfers between processes, by torch.distributed."""

    def __init__(
        self,
        rank: int,
        communicators: Mapping[Channel, dist.ProcessGroup] | None = None,
        deadline: float | None = None,
    ) -> None:
        """`communicators`: of each channel that does not use the default process group; `deadline`: seconds for each
        wait, by default those of its process group. Under `launch` that is practically no limit, as for collectives:
        the watchdog finds what hangs, since it alone knows whether the run is suspended, and who stopped first."""
        self._rank, self._communicators = rank, communicators or {}
        self._deadline = None if deadline is None else timedelta(seconds=deadline)
        self._pending: dict[Hashable, _Pending] = {}

    def post(
        self, key: Hashable, source: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """As `Transfers.post`."""
        buffer = torch.empty(count, dtype=dtype, device=device)
        group = self._communicators.get((source, self._rank))
        self._pending[key] = self._begun(key, dist.irecv(buffer, source, group=group), buffer)
        return buffer

    def send(self, key: Hashable, target: int, value: Tensor) -> None:
        """As `Transfers.send`."""
        group = self._communicators.get((self._rank, target))
        self._pending[key] = self._begun(key, dist.isend(value, target, group=group), value)

    @staticmethod
    def _begun(key: Hashable, work: dist.Work | None, buffer: Tensor) -> _Pending:
        if work is None:
            raise HyperParallelError(f"{key}: this rank is not in the transfer's process group")
        return _Pending(work, buffer)

    def wait(self, key: Hashable) -> Tensor:
        """As `Transfers.wait`."""
        pending = self._pending.pop(key)
        begun = time.monotonic()
        try:
            pending.work.wait() if self._deadline is None else pending.work.wait(self._deadline)
        except RuntimeError as error:
            took = time.monotonic() - begun
            raise TransferError(f"not over after {took:.1f} s: {error}") from error
        return pending.buffer

    def drain(self) -> None:
        """As `Transfers.drain`."""
        for key in list(self._pending):
            self.wait(key)


class MemoryTransfers:
    """Transfers between ranks of one process, a thread each: a queue for each channel, first in, first out."""

    def __init__(self, rank: int, channels: Mapping[Channel, queue.Queue[Tensor]], deadline: float) -> None:
        """`channels`: the same ones for all ranks; `deadline`: seconds for each wait."""
        self._rank, self._channels, self._deadline = rank, channels, deadline
        self._posted: dict[Hashable, tuple[int, Tensor]] = {}
        """By key: the source, and the memory for what comes."""
        self._arrived: dict[Hashable, Tensor] = {}
        self._sent: dict[Hashable, Tensor] = {}

    def post(
        self, key: Hashable, source: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """As `Transfers.post`."""
        buffer = torch.empty(count, dtype=dtype, device=device)
        self._posted[key] = source, buffer
        return buffer

    def send(self, key: Hashable, target: int, value: Tensor) -> None:
        """As `Transfers.send`."""
        self._sent[key] = value
        self._channels[self._rank, target].put(value.clone())

    def wait(self, key: Hashable) -> Tensor:
        """As `Transfers.wait`."""
        if key in self._sent:
            return self._sent.pop(key)
        while key not in self._arrived:
            # The first that was posted is the first that comes.
            source, _ = self._posted[key]
            first = next(one for one, (other, _) in self._posted.items() if other == source)
            try:
                value = self._channels[source, self._rank].get(timeout=self._deadline)
            except queue.Empty:
                raise TransferError(f"not over after {self._deadline:.1f} s") from None
            self._arrived[first] = self._posted.pop(first)[1].copy_(value)
        return self._arrived.pop(key)

    def drain(self) -> None:
        """As `Transfers.drain`."""
        self._sent.clear()


def memory_channels(world: int) -> dict[Channel, queue.Queue[Tensor]]:
    """The channels between the ranks of one process."""
    return {(a, b): queue.Queue() for a in range(world) for b in range(world)}
