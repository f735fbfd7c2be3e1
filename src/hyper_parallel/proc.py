"""Bytes that Linux states in files of lines such as ``MemAvailable:  123 kB``."""

from __future__ import annotations

from pathlib import Path

MEMORY = "/proc/meminfo"
"""The system's memory."""
PROCESS = "/proc/self/status"
"""This process's."""


def bytes_in(path: str, key: str) -> int | None:
    """The bytes of a line; None where the file or the line is missing."""
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None
