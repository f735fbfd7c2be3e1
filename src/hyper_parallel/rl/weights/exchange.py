"""The messages of a version on one rank, sent and received round by round into staging tensors.

What leaves the source was packed before. A message is its header and its payload, at once; with delta encoding the
payload follows the header, which has its length. Receives are posted a round ahead (with delta encoding when they are
due), since the library holds a send back until its receive is posted. After the last round every receiver acknowledges
to each of its senders, with one byte, that all it was sent is right.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.compat.process_groups import PeerError, Pending, StandaloneGroup
from hyper_parallel.errors import WeightsError
from hyper_parallel.rl.weights.payload import (
    HEADER_BYTES,
    Header,
    apply_difference,
    box_of,
    checksum,
    difference,
    pack,
    packed_bytes,
    payload_of,
    unpack,
)
from hyper_parallel.rl.weights.plan import Message, WeightPlan

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


class VersionMessages:
    """One version under way. Everything raises WeightsError when it fails or is late."""

    def __init__(
        self,
        link: Link,
        pool: BufferPool,
        version: int | None,
        staged: Mapping[str, Tensor],
        held: int,
        seconds: float,
    ) -> None:
        """`version`: None until the first header says it. `held`: the version in `staged`, -1 for none. `seconds`: the
        time from now until the deadline."""
        self.version, self.staged = version, staged
        self._link, self._pool, self._held = link, pool, held
        self._began, self._seconds = time.monotonic(), seconds
        self._sends: list[tuple[Message, Pending]] = []

    def send(self, message: Message, tensor: Tensor, to: int | None = None) -> None:
        """Begin to send, and keep the tensor until it is sent. `to`: the message's receiver."""
        try:
            pending = self._link.group.send(tensor, message.receiver if to is None else to)
        except PeerError as error:
            raise self._lost(message, error) from error
        self._sends.append((message, pending))

    def finish(self, given: Mapping[int, Message], taken: Mapping[int, Message]) -> None:
        """Acknowledge what was received, and wait until all that was sent is acknowledged.

        `given`: by receiver, a message that it was sent; `taken`: by sender, one that it sent.
        """
        coming = [(message, self._begin(message, 1, message.receiver)) for message in given.values()]
        for message in taken.values():
            self.send(message, torch.ones(1, dtype=torch.uint8), message.sender)
        for message, pending in coming:
            self._pool.give_back(self._wait(message, pending))
        for message, pending in self._sends:
            self._wait(message, pending)

    def begin(self, message: Message) -> Pending:
        """Begin to receive a message; of one that may be a difference only the header, which has its length."""
        delta = self._link.plan.options.delta
        return self._begin(message, HEADER_BYTES + (0 if delta else message.bytes))

    def receive(self, message: Message, place: int, pending: Pending) -> None:
        """Receive a message that has begun, check it and unpack it. `place`: the index that is due."""
        received = self._wait(message, pending)
        try:
            header = Header.parse(received[:HEADER_BYTES].numpy().tobytes())
        except ValueError as error:
            raise self._error(message, str(error)) from error
        if self.version is None:
            self.version = header.version
        if wrong := self._wrong(header, message, place):
            raise self._error(message, wrong)
        payload = payload_of(received)
        if self._link.plan.options.delta and header.length:
            self._pool.give_back(received)
            received = payload = self._wait(message, self._begin(message, header.length))
        if checksum(payload) != header.checksum:
            raise self._error(
                message, f"the checksum of {header.length} bytes with {message.named} does not match"
            )
        if header.base >= 0:
            old = self._pool.take(packed_bytes(message))
            pack(message, lambda part: box_of(self.staged[part.parameter.target], part.take), old)
            try:
                apply_difference(message, payload, payload_of(old))
            except ValueError as error:
                raise self._error(message, str(error)) from error
            self._pool.give_back(received)
            received, payload = old, payload_of(old)
        unpack(message, payload, self.staged)
        self._pool.give_back(received)

    def _wrong(self, header: Header, message: Message, place: int) -> str | None:
        """Why a header is not that of the message that is due."""
        plan, epoch = self._link.plan, self._link.epoch
        if header.digest != plan.digest:
            return "it has another plan; give both sides the same descriptions"
        if (header.epoch, header.place) != (epoch, place):
            return f"got message {header.place} of epoch {header.epoch}, and not message {place} of epoch {epoch}"
        if header.version != self.version:
            return f"it sends version {header.version}; all ranks must send the same version"
        if header.version <= self._held:
            return f"version {header.version} is stale: version {self._held} was received before"
        if header.base >= 0 and (not plan.options.delta or header.base != self._held):
            return f"it sends the changes since version {header.base}, but version {self._held} is the last one here"
        if header.length > message.bytes or (header.base < 0 and header.length != message.bytes):
            return f"got {header.length} bytes for {message.named}, which has {message.bytes}"
        return None

    def _begin(self, message: Message, size: int, sender: int | None = None) -> Pending:
        tensor = self._pool.take(size)
        try:
            return self._link.group.receive(tensor, message.sender if sender is None else sender)
        except PeerError as error:
            raise self._lost(message, error) from error

    def _wait(self, message: Message, pending: Pending) -> Tensor:
        try:
            return self._link.group.wait(pending, self._began + self._seconds - time.monotonic())
        except PeerError as error:
            raise self._lost(message, error) from error

    def _lost(self, message: Message, error: PeerError) -> WeightsError:
        """A connection that was found broken, at once or after a wait."""
        took = time.monotonic() - self._began
        return self._error(message, f"it failed after {took:.1f} s: {error}")

    def _error(self, message: Message, why: str) -> WeightsError:
        return self._link.error(self.version, message, why)


class BufferPool:
    """Buffers that are taken and given back. It has as many as were ever taken at the same time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        """By address."""

    def __len__(self) -> int:
        return len(self._free) + len(self._taken)

    def take(self, size: int) -> Tensor:
        """uint8[size], uninitialised: of the smallest free buffer that is large enough, or of a new one."""
        self._free.sort(key=lambda one: one.numel())
        at = next((at for at, one in enumerate(self._free) if one.numel() >= size), -1)
        whole = self._free.pop(at) if self._free else None
        if whole is None or whole.numel() < size:
            whole = torch.empty(size, dtype=torch.uint8)  # in the place of the largest, which was too small
        self._taken[whole.data_ptr()] = whole
        return whole[:size]

    def give_back(self, buffer: Tensor) -> None:
        """Let a buffer be used again; `buffer` as `take` gave it."""
        self._free.append(self._taken.pop(buffer.data_ptr()))


@dataclass(frozen=True, kw_only=True)
class Link:
    """A rank of a plan, and the process group of all of them."""

    plan: WeightPlan
    rank: int
    group: StandaloneGroup
    epoch: int
    """How many times the roles met before."""

    @property
    def named(self) -> str:
        """This rank by its role."""
        return self.plan.named(self.rank)

    def error(self, version: int | None, message: Message, why: str) -> WeightsError:
        """What went wrong with a message that this rank sends or receives; `version`: None before it is known."""
        if message.sender == self.rank:
            what, other = "send", f"to {self.plan.named(message.receiver)}"
        else:
            what, other = "receive", f"from {self.plan.named(message.sender)}"
        which = "the next version" if version is None else f"version {version}"
        return WeightsError(
            f"{self.named}: {what} weights, {which}, {other}: {why}; the old weights are in place, connect again with "
            "the next epoch"
        )
