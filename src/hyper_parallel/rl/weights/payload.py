"""Messages of a weight transfer: the header, boxes of tensors as bytes, and the difference between two payloads.

A payload has its parts one after the other, each as its elements in row-major order. A *difference* (`difference`,
`apply_difference`) has for each part of n elements a bitmap of ceil(n / 8) bytes, element i at bit 7 - i % 8 of byte
i // 8, and then the elements whose bits have changed. It is lossless, and shorter than the payload where fewer than
1 - 1 / (8 · item bytes) of the elements have changed (15 of 16 of a bfloat16 tensor).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyper_parallel.program.reshard import Slices
from hyper_parallel.rl.weights.plan import Message, Part

_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""By bytes of an element."""
_ROW = 128
"""Words of a checksum's row."""


def torch_dtype(name: str) -> torch.dtype:
    """``torch.bfloat16`` for ``bfloat16``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def pack(message: Message, value: Callable[[Part], Tensor], packed: Tensor) -> Tensor:
    """`packed`, uint8[64 + message.bytes] on the host: space for the header, and the payload, which is written.

    `value` gives a part's box, which is rounded to its element type on its way.
    """
    for part, into in _views(message, payload_of(packed)):
        box = value(part)
        into.view(box.shape).copy_(box)
    return packed


def packed_bytes(message: Message) -> int:
    """The length of what `pack` writes to."""
    return HEADER_BYTES + message.bytes


def payload_of(packed: Tensor) -> Tensor:
    """The payload in what `pack` made."""
    return packed[HEADER_BYTES:]


def unpack(message: Message, payload: Tensor, staged: Mapping[str, Tensor]) -> None:
    """Write a payload's parts into the receiver's tensors, which have the parts' element types."""
    for part, values in _views(message, payload):
        into = box_of(staged[part.parameter.target], part.take)
        into.copy_(values.view(into.shape))


def box_of(tensor: Tensor, slices: Slices) -> Tensor:
    """A box of a tensor; the tensor itself where it has no dims."""
    return tensor[slices] if slices else tensor


def checksum(payload: Tensor) -> int:
    """Of uint8[n] on the host: CRC-32 of the sums modulo 2^64 of each `_ROW` words of eight bytes, and of the rest.

    Any change within one word is found, and others in a row unless they cancel, a chance of 2^-64; it is several times
    faster than CRC-32 of all bytes.
    """
    rows = payload.numel() // (8 * _ROW)
    words = payload[: rows * 8 * _ROW].view(torch.int64).view(rows, _ROW)
    rest = payload[rows * 8 * _ROW :]
    return zlib.crc32(rest.numpy().data, zlib.crc32(words.sum(1).numpy().data))


def difference(message: Message, new: Tensor, old: Tensor) -> Tensor:
    """What makes `new` of `old`, both payloads of this message; `new` itself where that is no longer."""
    encoded: list[np.ndarray] = []
    for (_, mine), (_, theirs) in zip(_arrays(message, new), _arrays(message, old), strict=True):
        changed = mine != theirs
        encoded += [np.packbits(changed), mine[changed].view(np.uint8)]
    if not encoded or sum(part.nbytes for part in encoded) >= new.numel():
        return new
    return torch.from_numpy(np.concatenate(encoded))


def apply_difference(message: Message, encoded: Tensor, payload: Tensor) -> None:
    """Make of the old payload in `payload` the new one that `difference` was given.

    Raises ValueError where `encoded` is no difference of this message.
    """
    data, at = encoded.numpy(), 0
    for _, values in _arrays(message, payload):
        bitmap = -(-len(values) // 8)
        changed = np.unpackbits(data[at : at + bitmap], count=len(values)).astype(bool)
        size = int(changed.sum()) * values.itemsize
        at += bitmap
        if at + size > len(data):
            raise ValueError("a difference is shorter than its bitmap says")
        values[changed] = np.frombuffer(data[at : at + size].tobytes(), dtype=values.dtype)
        at += size
    if at != len(data):
        raise ValueError("a difference is longer than its bitmap says")


def _views(message: Message, payload: Tensor) -> Sequence[tuple[Part, Tensor]]:
    """Each part with its elements in a payload, flat."""
    found, at = [], 0
    for part in message.parts:
        found.append((part, payload[at : at + part.bytes].view(torch_dtype(part.parameter.dtype))))
        at += part.bytes
    return found


def _arrays(message: Message, payload: Tensor) -> Sequence[tuple[Part, np.ndarray]]:
    """As `_views`, the elements as unsigned integers of the same bits."""
    found, at, data = [], 0, payload.numpy()
    for part in message.parts:
        found.append((part, data[at : at + part.bytes].view(_INTEGERS[part.parameter.item_bytes])))
        at += part.bytes
    return found


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
