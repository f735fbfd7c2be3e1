"""Environments in one process: turns, rewards, the calculator, and which tokens are the policy's."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.rl.environments import CALLS, Calculator, Turn, evaluated, load_environment

TASK = {"prompt": "3*(4+5)=", "answer": "27"}


def test_a_single_turn() -> None:
    environment = load_environment("single_turn:math")()
    assert environment.reset(TASK) == "3*(4+5)="
    assert environment.step("54/2") == Turn(reward=1.0, done=True)
    assert environment.step("28") == Turn(reward=0.0, done=True)


def test_the_calculator() -> None:
    environment = load_environment("calculator")()
    assert environment.reset(TASK) == "3*(4+5)="
    assert environment.step("<calc>4+5</calc> and <calc>3*(4+5)</calc>") == Turn(text="<result>27</result>")
    assert environment.step("<calc>1/0</calc>") == Turn(text="<result>error: division by zero</result>")
    assert environment.step("It is \\boxed{27}") == Turn(reward=1.0, done=True)
    environment.reset(TASK)
    assert environment.step("26") == Turn(done=True)


def test_calls_are_limited() -> None:
    environment = Calculator()
    environment.reset(TASK)
    assert not any(environment.step("<calc>1</calc>").done for _ in range(CALLS))
    assert environment.step("<calc>1</calc>") == Turn(done=True)
    environment.reset(TASK)
    assert not environment.step("<calc>1</calc>").done


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2/4", "1/2"),
        ("-3", "-3"),
        ("0.1 + 2^-3", "9/40"),
        ("x", "error: it is no expression of numbers"),
        ("import os", "error: it is no expression of numbers"),
        ("__import__('os').getpid()", "error: it is no expression of numbers"),
        ("True + 1", "error: it is no expression of numbers"),
        ("2^0.5", "error: it is no expression of numbers"),
        ("(" * 1000, "error: it is no expression of numbers"),
        ("-" * 5000 + "1", "error: it is no expression of numbers"),
        ("9^9^9^9", "error: it is too large"),
        ("1/0^0", "1"),
        ("0^-1", "error: division by zero"),
    ],
)
def test_values(text: str, value: str) -> None:
    assert evaluated(text) == value


def test_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        load_environment("calculatr")
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        load_environment("single_turn:maths")


def test_a_row_without_a_prompt() -> None:
    rows: list[dict[str, Any]] = [{}, {"prompt": 3}, {"prompt": []}, {"prompt": ["hi"]}]
    for row in rows:
        with pytest.raises(DataError, match="under the key 'prompt'"):
            Calculator().reset(row)
