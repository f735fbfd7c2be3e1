"""Bytes, counts and seconds: parsed from what people write, printed the way people read them."""

from __future__ import annotations

import re

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BYTES = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Bytes from ``10GiB``, ``512MB``, ``1.5G`` or a plain integer.

    ``GiB`` is 2**30, ``GB`` and ``G`` are 10**9. Raises ValueError for anything else.
    """
    if isinstance(text, int):
        return text
    match = _BYTES.match(text)
    if match is None:
        raise ValueError(f"not a size in bytes: {text!r}; write for example 10GiB or 512MB")
    number, prefix, binary = match.groups()
    scale = _BINARY[prefix.upper()] if binary else _DECIMAL[prefix.lower()]
    return int(float(number) * scale)


def format_bytes(count: float) -> str:
    """``1.5 GiB`` from 1610612736; exact below 1 KiB."""
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if abs(count) < 1024 or prefix == "Ti":
            return f"{count:.0f} B" if not prefix else f"{count:.1f} {prefix}B"
        count /= 1024
    raise AssertionError("unreachable")


def format_count(count: float) -> str:
    """``8.0B`` from 8_030_261_248; for parameters and tokens."""
    for prefix in ("", "K", "M", "B", "T"):
        if abs(count) < 1000 or prefix == "T":
            return f"{count:.0f}" if not prefix else f"{count:.1f}{prefix}"
        count /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """``3m 05s`` above a minute, ``4.2s`` and ``310ms`` below."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"
