"""Formatting of bytes, counts and seconds."""

from __future__ import annotations

import re


def format_bytes(count: float) -> str:
    """``1.5 GiB`` from 1610612736; exact below 1 KiB."""
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if abs(count) < 1024 or prefix == "Ti":
            return f"{count:.0f} B" if not prefix else f"{count:.1f} {prefix}B"
        count /= 1024
    raise AssertionError("unreachable")


def round_up(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


_UNITS = {
    "": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)")


def parse_bytes(text: str) -> int:
    """1610612736 from ``1.5GiB``; GB are 1000³ bytes. Raises ValueError, which lists the accepted forms.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    found = _AMOUNT.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no number of bytes; write 10GiB, 512MiB, or the number itself")
    return int(float(found[1]) * _UNITS[found[2]])


def exact_bytes(count: int) -> str | int:
    """``10GiB``: text that `parse_bytes` reads back, in the largest unit that gives a whole number."""
    for prefix, power in (("T", 4), ("G", 3), ("M", 2), ("K", 1)):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{prefix}iB"
    return count


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


_TIMES = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> float:
    """900.0 from ``15min``. Raises ValueError, which lists the accepted forms.

    >>> parse_seconds("1.5h")
    5400.0
    """
    found = _AMOUNT.fullmatch(text.strip().lower())
    if found is None or found[2] not in _TIMES:
        raise ValueError(f"{text!r} is no length of time; write 90s, 15min or 2h")
    return float(found[1]) * _TIMES[found[2]]


def format_interval(seconds: float, interval: tuple[float, float]) -> str:
    """``10.9–14.1``: an interval in the unit in which `format_duration` shows `seconds`.

    >>> format_interval(12.3, (10.9, 14.1))
    '10.9–14.1'
    """
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}[format_duration(seconds).split()[1]]
    low, high = (value * scale for value in interval)
    digits = 2 if high < 10 else 1 if high < 100 else 0
    return f"{low:.{digits}f}–{high:.{digits}f}"


def format_duration(seconds: float) -> str:
    """Three digits in a suitable unit, for times of kernels and steps: ``85.2 µs``, ``3.12 ms``, ``1.24 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        # What rounds to 1000 of a unit is 1 of the next.
        if abs(seconds) * scale >= 0.9995 or unit == "ns":
            value = seconds * scale
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}" if value else "0 s"
    raise AssertionError("unreachable")
