"""The transfers of a Program's instructions on one rank, and whether the ranks agree on them.

Before the first step every rank compares the sizes of what it sends and receives with the others: a larger send into a
smaller receive would abort a process on gloo, and hang on NCCL.
"""

from __future__ import annotations

import hashlib
import json
import queue
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.errors import FollowsError, HyperParallelError
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.program import Program, Recv, Send, Wait


class RankTransfers:
    """What one rank sends and receives."""

    def __init__(
        self,
        program: Program,
        partition: Partition,
        rank: int,
        transfers: Transfers,
        device: torch.device,
        turns: Mapping[tuple[int, int], Sequence[int]] | None = None,
    ) -> None:
        """Arguments as of `Interpreter`; `device`: where what comes is to lie."""
        self._program, self._rank, self._transfers, self._device = program, rank, transfers, device
        (self.group,) = (one for one in program.groups.values() if rank in one.ranks)
        self._orders = program.instructions[self.group.name], sorted((turns or {}).items())
        self._ports: dict[str, Crossing] = {
            one.name: one for stage in partition.stages for one in (*stage.sends, *stage.gradients_out)
        }

    def port(self, name: str) -> Crossing:
        """What crosses at a port."""
        return self._ports[name]

    def post(self, one: Recv) -> Tensor:
        """Post a receive; the memory that what comes will be in, [elements], which `wait` gives too."""
        value = self._ports[one.port].value
        return self._transfers.post(
            self._key(one), self._peer(one.source), span(value), value.dtype, self._device
        )

    def send(self, one: Send, value: Tensor) -> None:
        """Begin to send a flat value."""
        self._transfers.send(self._key(one), self._peer(one.to), value)

    def wait(self, one: Wait) -> Tensor:
        """Wait for a transfer: what was received, or what was sent. Raises TransferError."""
        return self._transfers.wait(self._key(one))

    def drain(self) -> None:
        """Wait for the sends that nobody waited for."""
        self._transfers.drain()

    def _peer(self, group: str) -> int:
        """The rank of another group with this rank's place in its mesh."""
        return self._program.groups[group].ranks[self.group.place(self._rank)]

    @staticmethod
    def _key(one: Send | Recv | Wait) -> tuple[Hashable, ...]:
        other = one.to if isinstance(one, Send) else one.source if isinstance(one, Recv) else one.peer
        return one.port, one.micro_batch, other

    def _messages(self, one: Send | Recv) -> Iterator[tuple[int, str]]:
        """The ranks at the other end, and what is sent to or received from each."""
        value = self._ports[one.port].value
        other = self._peer(one.to if isinstance(one, Send) else one.source)
        yield other, f"{span(value)} {value.shape} {value.stride} {value.dtype}"

    def compare(self) -> None:
        """Raise HyperParallelError where this rank and another one disagree on what they send each other: to be called
        before the first step, on every rank. A collective."""
        mine: dict[str, str] = {}
        for one in self._orders[0]:
            if isinstance(one, Send | Recv):
                for other, carried in self._messages(one):
                    out = isinstance(one, Send)
                    channel = f"{self._rank} to {other}" if out else f"{other} to {self._rank}"
                    text = f"{mine.get(channel, '')}{one.port} {one.micro_batch} {carried}"
                    mine[channel] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        order = hashlib.blake2b(repr(self._orders).encode(), digest_size=16).hexdigest()
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, json.dumps({**mine, "order": order}))
        for other in self.group.ranks:
            if json.loads(everyone[other])["order"] != order:
                raise HyperParallelError(
                    f"ranks {self._rank} and {other} of {self.group.name} have different orders of instructions, and "
                    "would not meet in the collectives of their stages; both must have planned the same schedule"
                )
        for channel, digest in mine.items():
            sender, _, receiver = channel.partition(" to ")
            other = int(receiver if int(sender) == self._rank else sender)
            if json.loads(everyone[other]).get(channel) != digest:
                raise HyperParallelError(
                    f"rank {sender} sends rank {receiver} other values than rank {receiver} expects; both must have "
                    "captured the same model, micro-batch and schedule"
                )


# Point-to-point transfers of one rank: receives posted ahead, sends that hold their buffer.
#
# The k-th send from a rank to another meets that rank's k-th receive, on every backend; tags are not used, since NCCL
# and HCCL have none. A channel can be given a communicator of its own, so that what goes forward and what comes back do
# not hold each other up; without one, all share the default process group, which gloo can and NCCL cannot.

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
