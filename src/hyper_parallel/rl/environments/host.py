"""The worker's side of environments: episodes by key, and their repetition in a new process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.rl.environments.environment import Environment, Turn, load_environment
from hyper_parallel.rl.rewards.worker import Handler, number_of


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
