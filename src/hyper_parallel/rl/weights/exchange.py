"""The messages of a version on one rank, sent and received round by round into staging tensors.

What leaves the source was packed before. A message is its header and its payload, at once; with delta encoding the
payload follows the header, which has its length. Receives are posted a round ahead (with delta encoding when they are
due), since the library holds a send back until its receive is posted. After the last round every receiver acknowledges
to each of its senders, with one byte, that all it was sent is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hyper_parallel.compat.standalone_group import Pending
from hyper_parallel.rl.weights.buffers import BufferPool
from hyper_parallel.rl.weights.header import HEADER_BYTES, Header
from hyper_parallel.rl.weights.link import Link
from hyper_parallel.rl.weights.payload import box_of, checksum, difference, pack, packed_bytes, payload_of
from hyper_parallel.rl.weights.plan import Message
from hyper_parallel.rl.weights.version_messages import VersionMessages

Numbered = tuple[int, Message]
"""A message with its index among those that its sender and receiver exchange in one version."""
Key = tuple[int, int]
"""Receiver and that index, of a message that this rank sends."""


class Exchange:
    """What one rank sends and receives of each version."""

    def __init__(self, link: Link) -> None:
        self._link, self._rounds = link, _numbered(link)
        messages = [message for halves in self._rounds for half in halves for _, message in half]
        self._given = {m.receiver: m for m in messages if m.sender == link.rank}
        self._taken = {m.sender: m for m in messages if m.receiver == link.rank}
        self._pool = BufferPool()
        """Of what is sent and received: all given back when a version is over, but `_sent`."""
        self._sent: dict[Key, Tensor] = {}
        """What was packed for the last version; with delta encoding it stays until the next."""
        self._base_version = -1
        self.sent_bytes = 0
        """Bytes that this rank has sent, headers and acknowledgements included."""

    def packed(self, source: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """Copies of all that this rank sends of its own parameters."""
        return {
            (message.receiver, place): pack(
                message,
                lambda part: box_of(source[part.parameter.source], part.give),
                self._pool.take(packed_bytes(message)),
            )
            for cross, _ in self._rounds
            for place, message in cross
            if message.sender == self._link.rank
        }

    def run(
        self,
        version: int | None,
        packed: dict[Key, Tensor],
        staged: Mapping[str, Tensor],
        held: int,
        seconds: float,
    ) -> int:
        """Send and receive one version, and return it; `packed` is emptied.

        Arguments as of `VersionMessages`. Raises WeightsError, after which the other ranks can no longer be relied on.
        """
        one = VersionMessages(self._link, self._pool, version, staged, held, seconds)
        ahead: list[deque[Pending]] = []
        for at, (cross, gather) in enumerate(self._rounds):
            for later in self._rounds[len(ahead) : at + 2]:
                ahead.append(deque())
                if not self._link.plan.options.delta:
                    ahead[-1].extend(one.begin(message) for _, message in self._coming(later))
            for half in (cross, gather):
                self._half_round(one, half, packed if half is cross else None, ahead[at])
        one.finish(self._given, self._taken)
        self.sent_bytes += len(self._taken)
        if not self._link.plan.options.delta:
            for buffer in self._sent.values():
                self._pool.give_back(buffer)
            self._sent = {}
        assert one.version is not None, "a rank that is given no version receives a message"
        self._base_version = one.version
        return one.version

    def _coming(self, halves: Iterable[Sequence[Numbered]]) -> list[Numbered]:
        """The messages that this rank receives, in the order in which they are posted."""
        return [entry for half in halves for entry in half if entry[1].receiver == self._link.rank]

    def _half_round(
        self,
        one: VersionMessages,
        messages: Sequence[Numbered],
        packed: dict[Key, Tensor] | None,
        begun: deque[Pending],
    ) -> None:
        """`packed`: None where what is sent was received before. `begun`: the receives posted ahead."""
        coming = self._coming([messages])
        if self._link.plan.options.delta:
            begun.extend(one.begin(message) for _, message in coming)
        for place, message in messages:
            if message.sender == self._link.rank:
                whole = (
                    packed.pop((message.receiver, place))
                    if packed is not None
                    else pack(
                        message,
                        lambda part: box_of(one.staged[part.parameter.target], part.give),
                        self._pool.take(packed_bytes(message)),
                    )
                )
                self._send(one, message, place, whole)
        for place, message in coming:
            one.receive(message, place, begun.popleft())

    def _send(self, one: VersionMessages, message: Message, place: int, packed: Tensor) -> None:
        assert one.version is not None, "who sends knows the version"
        payload, base, delta = payload_of(packed), -1, self._link.plan.options.delta
        sent, key = payload, (message.receiver, place)
        if delta and key in self._sent:
            old = self._sent[key]
            sent = difference(message, payload, payload_of(old))
            base = -1 if sent is payload else self._base_version
            self._pool.give_back(old)
        self._sent[key] = packed
        header = Header(
            digest=self._link.plan.digest,
            epoch=self._link.epoch,
            place=place,
            version=one.version,
            base=base,
            length=sent.numel(),
            checksum=checksum(sent),
        )
        packed[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        one.send(message, packed[:HEADER_BYTES] if delta else packed)
        if delta and sent.numel():
            one.send(message, sent)
        self.sent_bytes += HEADER_BYTES + sent.numel()


def _numbered(link: Link) -> list[tuple[list[Numbered], list[Numbered]]]:
    """The rounds of a rank, each message with its index."""
    counts: dict[tuple[int, int], int] = {}

    def number(messages: Sequence[Message]) -> Iterator[Numbered]:
        for message in messages:
            pair = message.sender, message.receiver
            yield counts.setdefault(pair, 0), message
            counts[pair] += 1

    return [(list(number(one.cross)), list(number(one.gather))) for one in link.plan.of(link.rank)]
