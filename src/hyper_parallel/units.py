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


def format_duration(seconds: float) -> str:
    """Three digits in the unit that suits, for what kernels and steps take: ``85.2 µs``, ``3.12 ms``, ``1.24 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        # What rounds to 1000 of a unit is 1 of the next.
        if abs(seconds) * scale >= 0.9995 or unit == "ns":
            value = seconds * scale
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}" if value else "0 s"
    raise AssertionError("unreachable")
