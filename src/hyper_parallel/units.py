"""Bytes, counts and seconds, printed the way people read them."""

from __future__ import annotations


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
