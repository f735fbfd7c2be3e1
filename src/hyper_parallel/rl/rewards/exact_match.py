"""Exact match of normalized texts, after a regular expression has extracted the answer.

Row: `answer` (a text, or a list of texts of which one must match); optional `extract` (a regular expression; its last
match counts, and in it the first group if it has one) and `ignore_case`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.reward import Prompt


def exact_match(prompt: Prompt, answer: str, task: Mapping[str, Any]) -> float:
    """1 if the answer, or what `extract` finds in it, is a reference answer; else 0. Raises DataError for a row without
    one, or with a wrong expression.
    """
    found: str | None = answer
    if "extract" in task:
        matches = list(_expression(task["extract"]).finditer(answer))
        found = (matches[-1][1] if matches[-1].re.groups else matches[-1][0]) if matches else None
    if found is None:
        return 0.0
    fold = bool(task.get("ignore_case", False))
    return float(normalized(found, fold) in {normalized(text, fold) for text in reference_answers(task)})


def reference_answers(task: Mapping[str, Any]) -> list[str]:
    """The `answer` of a row as a list. Raises DataError when it is missing or is no text."""
    given = task.get("answer")
    answers: list[Any] = given if isinstance(given, list) else [given]
    if not answers or not all(isinstance(text, str) for text in answers):
        raise DataError(
            f"the row's answer is {given!r}; write a text, or a list of texts, under the key 'answer'"
        )
    return answers


def normalized(text: str, ignore_case: bool = False) -> str:
    """Unicode's compatibility form (NFKC), with one space for each run of white space, and none at the ends."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text.casefold() if ignore_case else text


@lru_cache(maxsize=256)
def _expression(text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except (re.error, TypeError) as error:
        raise DataError(f"the row's extract, {text!r}, is no regular expression: {error}; mend it") from error
