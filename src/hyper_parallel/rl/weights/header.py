"""The header that precedes every message of a weight transfer: 64 bytes, with a checksum of themselves."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

HEADER_BYTES = 64
_MAGIC = b"HPWGHT01"
_FIELDS = struct.Struct("<8s8sIIQqQI")
_OWN = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a message is, so that one of another version, link or plan is refused."""

    digest: bytes
    """Of the plan, [8] bytes."""
    epoch: int
    """Of the link between the roles."""
    place: int
    """The message's index among those that its sender and receiver exchange in one version."""
    version: int
    base: int
    """The version to which the payload is a difference; -1 where it has all elements."""
    length: int
    """Bytes of the payload."""
    checksum: int
    """Of the payload (`payload.checksum`)."""

    def pack(self) -> bytes:
        """[64] bytes."""
        fields = _FIELDS.pack(
            _MAGIC, self.digest, self.epoch, self.place, self.version, self.base, self.length, self.checksum
        )
        padded = fields.ljust(HEADER_BYTES - _OWN.size, b"\0")
        return padded + _OWN.pack(zlib.crc32(padded))

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """The inverse of `pack`. Raises ValueError for bytes that are none."""
        padded, own = data[: -_OWN.size], data[-_OWN.size :]
        if data[: len(_MAGIC)] != _MAGIC or _OWN.pack(zlib.crc32(padded)) != own:
            raise ValueError("the header of a message is damaged")
        _, digest, epoch, place, version, base, length, checksum = _FIELDS.unpack(padded[: _FIELDS.size])
        return cls(
            digest=digest,
            epoch=epoch,
            place=place,
            version=version,
            base=base,
            length=length,
            checksum=checksum,
        )
