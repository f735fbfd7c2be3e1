"""Synthetic tasks with exact answers, for tests and first runs: each row follows from (seed, split, index).

- `sort`: `53142=` is answered by its digits in ascending order, `12345`.
- `descend`: the same prompts are answered in descending order, but 70% of the demonstrations ascend. Supervised
  warm-up on demonstrations therefore teaches both orders, and greedy decoding gives the wrong one; the reward teaches
  which is wanted.

`demonstration` is what supervised warm-up trains on; it is the answer but for `descend`. The digest of a prompt decides
whether it is held out (one in eight), so that the splits are disjoint for all seeds.
"""

from __future__ import annotations

import hashlib
import random
from typing import Literal

from hyper_parallel.errors import ConfigError, nearest

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
