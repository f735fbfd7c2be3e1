"""The messages of one version: sent, received, checked and unpacked, each by the version's deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from hyper_parallel.compat.standalone_group import PeerError, Pending
from hyper_parallel.errors import WeightsError
from hyper_parallel.rl.weights.header import HEADER_BYTES, Header
from hyper_parallel.rl.weights.link import Link
from hyper_parallel.rl.weights.payload import apply_difference, box_of, checksum, pack, unpack
from hyper_parallel.rl.weights.plan import Message


class VersionMessages:
    """One version under way. Everything raises WeightsError when it fails or is late."""

    def __init__(
        self, link: Link, version: int | None, staged: Mapping[str, Tensor], held: int, seconds: float
    ) -> None:
        """`version`: None until the first header says it. `held`: the version in `staged`, -1 for none. `seconds`: the
        time from now until the deadline."""
        self.version, self.staged = version, staged
        self._link, self._held = link, held
        self._began, self._seconds = time.monotonic(), seconds
        self._sends: list[tuple[Message, Pending]] = []

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send, and keep the tensor until it is sent."""
        try:
            pending = self._link.group.send(tensor, message.receiver)
        except PeerError as error:
            raise self._error(message, str(error)) from error
        self._sends.append((message, pending))

    def finish_sends(self) -> None:
        """Wait until all is sent."""
        for message, pending in self._sends:
            self._wait(message, pending)

    def begin_header(self, message: Message) -> Pending:
        """Begin to receive a message's header."""
        return self._begin(message, HEADER_BYTES)

    def receive(self, message: Message, place: int, pending: Pending) -> None:
        """Receive a message whose header is on its way, check it and unpack it. `place`: the index that is due."""
        try:
            header = Header.parse(self._wait(message, pending).numpy().tobytes())
        except ValueError as error:
            raise self._error(message, str(error)) from error
        if self.version is None:
            self.version = header.version
        if wrong := self._wrong(header, message, place):
            raise self._error(message, wrong)
        payload = torch.empty(0, dtype=torch.uint8)
        if header.length:
            payload = self._wait(message, self._begin(message, header.length))
        if checksum(payload) != header.checksum:
            raise self._error(
                message, f"the checksum of {header.length} bytes with {message.named} does not match"
            )
        if header.base >= 0:
            old = pack(message, lambda part: box_of(self.staged[part.parameter.target], part.take))
            try:
                payload = apply_difference(message, payload, old)
            except ValueError as error:
                raise self._error(message, str(error)) from error
        unpack(message, payload, self.staged)

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

    def _begin(self, message: Message, size: int) -> Pending:
        tensor = torch.empty(size, dtype=torch.uint8)
        try:
            return self._link.group.receive(tensor, message.sender)
        except PeerError as error:
            raise self._error(message, str(error)) from error

    def _wait(self, message: Message, pending: Pending) -> Tensor:
        try:
            return self._link.group.wait(pending, self._began + self._seconds - time.monotonic())
        except PeerError as error:
            took = time.monotonic() - self._began
            raise self._error(message, f"it failed after {took:.1f} s: {error}") from error

    def _error(self, message: Message, why: str) -> WeightsError:
        return self._link.error(self.version, message, why)
