"""The messages of one version: sent, received, checked and unpacked, each by the version's deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from hyper_parallel.compat.standalone_group import PeerError, Pending
from hyper_parallel.errors import WeightsError
from hyper_parallel.rl.weights.buffers import BufferPool
from hyper_parallel.rl.weights.header import HEADER_BYTES, Header
from hyper_parallel.rl.weights.link import Link
from hyper_parallel.rl.weights.payload import (
    apply_difference,
    box_of,
    checksum,
    pack,
    packed_bytes,
    payload_of,
    unpack,
)
from hyper_parallel.rl.weights.plan import Message


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
