"""A tool environment: the policy may ask a calculator before it answers.

The policy's text `<calc>3*(4+5)</calc>` is answered by `<result>27</result>`; only the last call of a text counts. A
text without a call ends the episode and is judged as `math` judges it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from hyper_parallel.rl.environments.environment import Turn, prompt_of
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
    """The value of an expression of numbers, + - * / ^ and parentheses, as a whole number or a fraction; or `error: `
    and the reason.
    """
    try:
        # Python's parser reads it; nothing but numbers and these operators is computed.
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval")
        return str(_value(tree.body))
    except ZeroDivisionError:
        return "error: division by zero"
    except _TooLarge:
        return "error: it is too large"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: it is no expression of numbers"


class _TooLarge(Exception):
    pass


_BITS = 10_000
"""Of a numerator and a denominator."""
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            return -_value(inner) if isinstance(sign, ast.USub) else _value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left), _value(right)
            if exponent.denominator != 1:
                raise ValueError
            if abs(exponent) * _bits(base) > _BITS:
                raise _TooLarge
            return Fraction(base ** int(exponent))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left), _value(right))
            if _bits(value) > _BITS:
                raise _TooLarge
            return value
    raise ValueError


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
