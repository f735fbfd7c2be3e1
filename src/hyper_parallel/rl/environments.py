"""Environments: a task's prompt, and what answers to a policy's answers, in one turn or several with tools."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from hyper_parallel.data.document import template_options
from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.answer_match import math_expression
from hyper_parallel.rl.rewards.reward import Prompt, RewardFunction, load_callable, load_reward, with_options
from hyper_parallel.rl.rewards.worker import Handler, number_of

# Environments: a task's prompt, and a text or a message and a reward for each answer of the policy.
#
# An episode is `reset(task)`, then `step(answer)` until a turn is `done`. Its reward is the sum over its turns. The
# text of a turn is appended to the policy's answer; its tokens are not the policy's, and no objective trains them. An
# environment is used by one episode at a time, and should give the same turns for the same answers:
# the pool repeats an episode when its process was lost.


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an environment gives for an answer."""

    text: str = ""
    """Appended after the answer, when the episode goes on; the policy reads it and continues. In a conversation it is
    the content of a `user` message."""
    message: Mapping[str, Any] | None = None
    """In a conversation, in place of `text`: `{"role": "tool", "content": "..."}`, and what else the chat template
    takes."""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode at a time."""

    def reset(self, task: Mapping[str, Any]) -> Prompt:
        """Begin an episode; its prompt."""
        ...

    def step(self, answer: str) -> Turn:
        """Answer to the text that the policy generated since `reset` or the last turn."""
        ...


class SingleTurn:
    """The environment of a reward function: one answer, and its reward."""

    def __init__(self, reward: RewardFunction) -> None:
        self._reward = reward
        self._task: Mapping[str, Any] = {}

    def reset(self, task: Mapping[str, Any]) -> Prompt:
        """The row's `prompt`."""
        self._task = task
        return prompt_of(task)

    def step(self, answer: str) -> Turn:
        """Ends the episode with the answer's reward."""
        return Turn(reward=self._reward(prompt_of(self._task), answer, self._task), done=True)


BUILTIN = {"calculator": "hyper_parallel.rl.environments:Calculator"}
"""Names of environments to their classes."""
_SINGLE = "single_turn:"


def load_environment(
    name: str, folder: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[], Environment]:
    """What makes environments of a name: `calculator`, `single_turn:` and a name of `load_reward`,
    `package.module:Class` or `file.py:Class`.

    `folder`: of the run file. `options`: keyword arguments of the class, or of the reward. Imports the user's code.
    Raises ConfigError, in one line.
    """
    if name.startswith(_SINGLE):
        reward = load_reward(name.removeprefix(_SINGLE), folder, options)
        return lambda: SingleTurn(reward)
    made: Callable[[], Environment] = with_options(
        load_callable(name, "an environment", BUILTIN, folder), name, options or {}, 0
    )
    return made


def prompt_of(task: Mapping[str, Any]) -> Prompt:
    """The prompt of a row. Raises DataError when it is neither a text nor a list of messages."""
    prompt = task.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt):
        return prompt
    raise DataError(
        f"the row's prompt is {prompt!r}; write a text or a list of messages under the key 'prompt'"
    )


def prompt_fields(task: Mapping[str, Any]) -> dict[str, Any]:
    """The `prompt` of a row, and the `options` that its chat template gets. Raises DataError as `prompt_of`."""
    prompt = prompt_of(task)
    return {"prompt": prompt, "options": {} if isinstance(prompt, str) else template_options(task, "the row")}


def environments(name: str, folder: str, options: dict[str, Any]) -> Handler:
    """The handler of messages `{"do": "reset" | "step" | "drop", "key": number, ...}`."""
    make = load_environment(name, folder, options)
    episodes: dict[int, Environment] = {}

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        key: int = message["key"]
        match message["do"]:
            case "drop":
                episodes.pop(key, None)
                return {}
            case "reset":
                environment = make()
                prompt = environment.reset(message["task"])
                episodes[key] = environment
                return {"prompt": prompt}
        if "restore" in message:
            restored = _restored(make(), message["restore"])
            if restored is None:
                return {
                    "failed": "its process was lost, and the environment gave other turns for the same answers"
                }
            episodes[key] = restored
        if key not in episodes:
            return {"missing": True}
        # Taken out first: an episode whose step raises is over.
        environment = episodes.pop(key)
        reply = _step(environment, message["answer"])
        if not reply.get("done", True):
            episodes[key] = environment
        return reply

    return handle


def _step(environment: Environment, answer: str) -> dict[str, Any]:
    turn = environment.step(answer)
    number = number_of(turn.reward)
    if "failed" in number:
        return {"failed": f"the reward of a turn: {number['failed']}"}
    if not isinstance(turn.text, str):
        return {"failed": f"the text of a turn is {type(turn.text).__name__}, and a str is needed"}
    if (wrong := _wrong(turn)) is not None:
        return {"failed": f"the message of a turn {wrong}"}
    message = None if turn.message is None else dict(turn.message)
    return {"text": turn.text, "message": message, "reward": number["value"], "done": bool(turn.done)}


def _wrong(turn: Turn) -> str | None:
    """What is wrong with a turn's message."""
    message = turn.message
    if message is None:
        return None
    if turn.text:
        return "stands beside a text; give one of them"
    if not isinstance(message, Mapping) or not all(
        isinstance(message.get(key), str) for key in ("role", "content")
    ):
        return "is none; it needs texts under 'role' and 'content'"
    if message["role"] == "assistant":
        return "has the role 'assistant', which is the policy's; give another"
    return None


def _restored(environment: Environment, history: dict[str, Any]) -> Environment | None:
    environment.reset(history["task"])
    for answer, before in history["turns"]:
        if _step(environment, answer) != before:
            return None
    return environment


# A tool environment: the policy may ask a calculator before it answers.
#
# The policy's text `<calc>3*(4+5)</calc>` is answered by `<result>27</result>`; only the last call of a text counts. A
# text without a call ends the episode and is judged as `math` judges it.

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
