"""Tasks: synthetic ones with exact answers, for tests and first runs, and files of JSON lines.

- `sort`: `53142=` is answered by its digits in ascending order, `12345`.
- `descend`: the same prompts are answered in descending order, but 70% of the demonstrations ascend. Supervised
  warm-up on demonstrations therefore teaches both orders, and greedy decoding gives the wrong one; the reward teaches
  which is wanted.

Each synthetic row follows from (seed, split, index). `demonstration` is what supervised warm-up trains on; it is the
answer but for `descend`. The digest of a prompt decides whether it is held out (one in eight), so that the splits are
disjoint for all seeds.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from hyper_parallel.errors import ConfigError, DataError, nearest
from hyper_parallel.rl.environments import prompt_of
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted_files import open_regular, parse_json

Split = Literal["train", "held_out"]
Row = dict[str, str]
"""`prompt`, `answer` and `demonstration`."""

NAMES = ("descend", "sort")
VOCABULARY = "0123456789="
"""The characters of prompts and answers."""
ASCENDING = 0.7
"""Of the demonstrations of `descend`."""
_HELD_OUT = 8
_LONGEST = 64


def tasks(name: str, seed: int, split: Split, count: int, *, digits: int = 5, first: int = 0) -> list[Row]:
    """The rows `first` to `first + count` of a task. Prompts may repeat: there are 10^digits. Raises ConfigError.

    `digits`: of a prompt, 2 to 64.
    """
    if name not in NAMES:
        raise ConfigError(f"unknown task {name!r}{nearest(name, NAMES)}; it is one of {', '.join(NAMES)}")
    if split not in ("train", "held_out"):
        raise ConfigError(f"unknown split {split!r}; it is 'train' or 'held_out'")
    if not 2 <= digits <= _LONGEST:
        raise ConfigError(f"a task with {digits} digits; it has 2 to {_LONGEST}")
    return [_row(name, seed, split, digits, index) for index in range(first, first + count)]


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the split `held_out`."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).digest()[0] % _HELD_OUT == 0


def _row(name: str, seed: int, split: Split, digits: int, index: int) -> Row:
    draw = random.Random(f"{name} {seed} {split} {digits} {index}")
    while True:
        given = "".join(draw.choices("0123456789", k=digits))
        if is_held_out(given + "=") == (split == "held_out"):
            break
    ascending = "".join(sorted(given))
    answer = ascending if name == "sort" else ascending[::-1]
    wrong = name == "descend" and draw.random() < ASCENDING
    return {"prompt": given + "=", "answer": answer, "demonstration": ascending if wrong else answer}


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
