"""Sealed JSON files, which contain their own SHA-256 digest.

The text is ``json.dumps(body, sort_keys=True)`` and a newline, with one more key, ``sha256``: the digest of
the same text without that key. The bytes must be exactly that text, so that every changed bit is noticed,
also one that changes no value.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted import parse_json

LARGEST = 64 * 2**20
"""Maximum bytes of a sealed file: the index of a rank with a quarter of a million blocks."""


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def seal(body: Mapping[str, Any]) -> bytes:
    """The bytes of the sealed file for `body`, which must not have the key ``sha256``.

    Raises CheckpointError if no reader would accept it.
    """
    assert "sha256" not in body
    data = _text({**body, "sha256": hashlib.sha256(_text(body)).hexdigest()}) + b"\n"
    if len(data) > LARGEST:
        raise CheckpointError(
            f"the description of a checkpoint takes {format_bytes(len(data))}, and may take {format_bytes(LARGEST)}; "
            "save from more ranks, or less beside the tensors"
        )
    return data


def unseal(data: bytes) -> dict[str, Any]:
    """The body of a sealed file. Raises ValueError, with the reason in words, if a single bit differs."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise ValueError(str(error).partition(":")[0]) from error
    if not isinstance(body, dict) or "sha256" not in body:
        raise ValueError("its own sha256 is missing")
    try:
        same_text = _text(body) + b"\n" == data
    except ValueError:  # a NaN
        same_text = False
    digest = body.pop("sha256")
    if not same_text or hashlib.sha256(_text(body)).hexdigest() != digest:
        raise ValueError("its own sha256 differs")
    return body


def check_state(value: object, where: str = "state") -> None:
    """Raise CheckpointError, naming the place, if JSON cannot hold `value`.

    As usual with JSON, tuples come back as lists and integer keys (a Transformers config has some) as strings.
    """
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(
                f"{where} is {value}, which JSON does not have; save a finite number or None"
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) and type(key) is not int:
                raise CheckpointError(f"{where} has the key {key!r}; the keys of the state are strings")
            if not isinstance(key, str) and str(key) in value:
                raise CheckpointError(f"{where} has the keys {key!r} and {str(key)!r}, which are one in JSON")
            check_state(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            check_state(item, f"{where}[{position}]")
    else:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}; the state is JSON: numbers, strings, lists, dicts"
        )
