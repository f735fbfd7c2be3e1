"""Exact match: which spellings are the same, and what the expression extracts."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.answer_match import exact_match


@pytest.mark.parametrize(
    ("answer", "task", "reward"),
    [
        (" 12345 ", {"answer": "12345"}, 1),
        ("1234", {"answer": "12345"}, 0),
        ("a \n b", {"answer": "a b"}, 1),
        ("ﬁve", {"answer": "five"}, 1),
        ("Paris", {"answer": "paris"}, 0),
        ("PARIS", {"answer": "paris", "ignore_case": True}, 1),
        ("b", {"answer": ["a", "b"]}, 1),
        ("x=1; x=2", {"answer": "2", "extract": r"x=(\d)"}, 1),
        ("x=1; x=2", {"answer": "1", "extract": r"x=(\d)"}, 0),
        ("x=1", {"answer": "x=1", "extract": r"x=\d"}, 1),
        ("none", {"answer": "1", "extract": r"x=(\d)"}, 0),
        ("<a>line\nline</a>", {"answer": "line line", "extract": "<a>(.*)</a>"}, 1),
    ],
)
def test_reward(answer: str, task: dict[str, Any], reward: float) -> None:
    assert exact_match("prompt", answer, task) == reward


def test_a_wrong_row_is_an_error() -> None:
    with pytest.raises(DataError, match="no regular expression"):
        exact_match("", "a", {"answer": "a", "extract": "("})
    with pytest.raises(DataError, match="under the key 'answer'"):
        exact_match("", "a", {})
