"""Environments: a task's prompt, and a text or a message and a reward for each answer of the policy.

An episode is `reset(task)`, then `step(answer)` until a turn is `done`. Its reward is the sum over its turns. The text
of a turn is appended to the policy's answer; its tokens are not the policy's, and no objective trains them
(`token_mask`). An environment is used by one episode at a time, and should give the same turns for the same answers:
the pool repeats an episode when its process was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hyper_parallel.data.document import template_options
from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.reward import Prompt, RewardFunction, load_callable, load_reward, with_options


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


BUILTIN = {"calculator": "hyper_parallel.rl.environments.calculator:Calculator"}
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


def token_mask(segments: Sequence[tuple[Sequence[int], bool]]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(tokens, whether the policy drew each) of the segments of an episode after its prompt.

    A segment is (token ids, whether the policy drew them). Segments are tokenized one by one, so that a token never
    holds text of both.
    """
    tokens = tuple(token for ids, _ in segments for token in ids)
    return tokens, tuple(drawn for ids, drawn in segments for _ in ids)
