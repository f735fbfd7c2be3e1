"""The transfers of a Program's instructions on one rank, and whether the ranks agree on them.

Before the first step every rank compares the sizes of what it sends and receives with the others: a larger send into a
smaller receive would abort a process on gloo, and hang on NCCL.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.program import Program, Recv, Send, Wait
from hyper_parallel.runtime.transfers import Transfers


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
