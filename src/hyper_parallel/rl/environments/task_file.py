"""Task files: JSON lines, each an object with a prompt and what its reward function or environment needs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.errors import DataError
from hyper_parallel.rl.environments.environment import prompt_of
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted import open_regular, parse_json

_LINE = 16 << 20
"""Bytes of a line."""


Accept = Callable[[dict[str, Any]], bool]
"""Whether a row stays. Raises DataError for one that cannot."""


def read_tasks(path: str | Path, accept: Accept = lambda row: True) -> list[dict[str, Any]]:
    """The rows of a task file, in order; blank lines are skipped. Raises DataError, which names file and line."""
    rows: list[dict[str, Any]] = []
    try:
        with open_regular(path) as raw, io.BufferedReader(raw) as file:
            number = 0
            while line := file.readline(_LINE + 1):
                number += 1
                if len(line) > _LINE:
                    raise DataError(
                        f"{path}:{number}: the line is longer than {format_bytes(_LINE)}; divide it"
                    )
                if line.strip():
                    rows += _rows(line, f"{path}:{number}", accept)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}; name a file of JSON lines with a 'prompt' each"
        ) from error
    if not rows:
        raise DataError(f"{path}: it has no rows; write a JSON object with a 'prompt' on each line")
    return rows


def _rows(line: bytes, where: str, accept: Accept) -> list[dict[str, Any]]:
    """The row of a line, if it stays."""
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: {error}; write one JSON object on each line") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: it is {type(found).__name__}; write a JSON object with a 'prompt'")
    try:
        prompt_of(found)
        return [found] if accept(found) else []
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
