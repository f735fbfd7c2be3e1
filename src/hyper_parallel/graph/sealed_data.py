"""Plain data as bytes with a digest: magic · blake2b of the rest · the rest."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

_DIGEST = 16


class Unreadable(Exception):
    """Bytes are no graph, or one that this process cannot have."""


def sealed(magic: bytes, body: bytes) -> bytes:
    """The bytes of a file."""
    return magic + _digest(body) + body


def opened(magic: bytes, content: bytes) -> bytes:
    """What was sealed. Raises Unreadable."""
    head = len(magic) + _DIGEST
    body = content[head:]
    if content[: len(magic)] != magic or content[len(magic) : head] != _digest(body):
        raise Unreadable("it is damaged, or of another version")
    return body


def deflated(data: Any) -> bytes:
    """Data as JSON, with its length in front."""
    text = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1)
    return len(text).to_bytes(8, "big") + text


def inflated(body: bytes, at: int) -> tuple[Any, int]:
    """What `deflated` gave, from a place on, and where it ends."""
    begin = at + 8
    end = begin + int.from_bytes(body[at:begin], "big")
    return json.loads(zlib.decompress(body[begin:end])), end


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()
