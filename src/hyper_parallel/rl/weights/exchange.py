"""The messages of a version on one rank, sent and received round by round into staging tensors.

All payloads that leave the source were packed before. In a round a rank posts the receives of all headers, then, as
each header is found right, that of its payload; it checks the checksum and unpacks. Sends end on their own, and are
waited for after the last round: the library holds a send back until the receiver has posted its receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hyper_parallel.rl.weights.header import HEADER_BYTES, Header
from hyper_parallel.rl.weights.link import Link
from hyper_parallel.rl.weights.payload import box_of, checksum, difference, pack
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
        self._base: dict[Key, Tensor] = {}
        """With delta encoding: the payloads of the last version that was sent."""
        self._base_version = -1
        self.sent_bytes = 0
        """Bytes that this rank has sent, headers included."""

    def packed(self, source: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """Copies of all that this rank sends of its own parameters."""
        return {
            (message.receiver, place): pack(
                message, lambda part: box_of(source[part.parameter.source], part.give)
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
        one = VersionMessages(self._link, version, staged, held, seconds)
        for cross, gather in self._rounds:
            self._half_round(one, cross, packed)
            self._half_round(one, gather, None)
        one.finish_sends()
        assert one.version is not None, "a rank that is given no version receives a message"
        self._base_version = one.version
        return one.version

    def _half_round(
        self, one: VersionMessages, messages: Sequence[Numbered], packed: dict[Key, Tensor] | None
    ) -> None:
        """`packed`: None where what is sent was received before."""
        coming = [entry for entry in messages if entry[1].receiver == self._link.rank]
        headers = [one.begin_header(message) for _, message in coming]
        for place, message in messages:
            if message.sender == self._link.rank:
                payload = (
                    packed.pop((message.receiver, place))
                    if packed is not None
                    else pack(message, lambda part: box_of(one.staged[part.parameter.target], part.give))
                )
                self._send(one, message, place, payload)
        for (place, message), header in zip(coming, headers, strict=True):
            one.receive(message, place, header)

    def _send(self, one: VersionMessages, message: Message, place: int, payload: Tensor) -> None:
        assert one.version is not None, "who sends knows the version"
        sent, base = payload, -1
        if self._link.plan.options.delta:
            key = message.receiver, place
            if key in self._base:
                sent = difference(message, payload, self._base[key])
                base = -1 if sent is payload else self._base_version
            self._base[key] = payload
        header = Header(
            digest=self._link.plan.digest,
            epoch=self._link.epoch,
            place=place,
            version=one.version,
            base=base,
            length=sent.numel(),
            checksum=checksum(sent),
        )
        one.send(message, torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8))
        if sent.numel():
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
