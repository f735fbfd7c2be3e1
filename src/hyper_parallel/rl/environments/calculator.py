"""A tool environment: the policy may ask a calculator before it answers.

The policy's text `<calc>3*(4+5)</calc>` is answered by `<result>27</result>`; only the last call of a text counts. A
text without a call ends the episode and is judged as `math` judges it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hyper_parallel.rl.environments.environment import Turn, prompt_of
from hyper_parallel.rl.rewards.expression import parse
from hyper_parallel.rl.rewards.math_expression import math_expression
from hyper_parallel.rl.rewards.reward import Prompt

CALLS = 8
"""Calls of an episode; one more ends it without reward."""
_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)


class Calculator:
    """An environment with exact rational arithmetic as its tool. Row: `prompt`, `answer`."""

    def __init__(self) -> None:
        self._task: Mapping[str, Any] = {}
        self._calls = 0

    def reset(self, task: Mapping[str, Any]) -> Prompt:
        """The row's `prompt`."""
        self._task, self._calls = task, 0
        return prompt_of(task)

    def step(self, answer: str) -> Turn:
        """The result of a call, or the reward of an answer."""
        calls = _CALL.findall(answer)
        if not calls:
            return Turn(reward=math_expression(prompt_of(self._task), answer, self._task), done=True)
        self._calls += 1
        if self._calls > CALLS:
            return Turn(done=True)
        return Turn(text=f"<result>{evaluated(calls[-1])}</result>")


def evaluated(text: str) -> str:
    """The value of an expression as a whole number or a fraction, or `error: ` and the reason."""
    try:
        value = parse(text).rational
    except ValueError as error:
        return f"error: {error}"
    return "error: it is no rational number" if value is None else str(value)
