"""Pool of processes that hold environments, with a time limit for each `reset` and `step`.

An episode stays in one process. When that process is killed (an environment of any episode hung) or dies, its other
episodes are repeated in the new process, from their task and answers, at their next step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.environments import Turn
from hyper_parallel.rl.rewards.pool import WorkerPool, check_json
from hyper_parallel.rl.rewards.processes import Job
from hyper_parallel.rl.rewards.reward import Prompt


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came of a `reset` (`prompt`) or a `step` (`turn`); or why the episode failed, which ends it."""

    prompt: Prompt | None = None
    turn: Turn | None = None
    failed: str | None = None
    seconds: float = 0.0


@dataclass(kw_only=True)
class _Episode:
    number: int
    slot: int
    task: dict[str, Any]
    turns: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    busy: bool = True


class EnvironmentPool(WorkerPool):
    """Worker processes for one kind of environment. Close it, or use it as a context manager."""

    def __init__(
        self,
        name: str,
        *,
        workers: int = 2,
        time_limit_s: float = 10.0,
        folder: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`name`, `folder`, `options`: as `load_environment`. Returns when all workers have imported it; raises
        ConfigError if they cannot.
        """
        self._limit = time_limit_s
        super().__init__(
            "hyper_parallel.rl.environments:environments",
            name,
            workers=workers,
            time_limit_s=time_limit_s,
            folder=folder,
            options=options,
            what="environment",
        )
        self._workers = workers
        self._episodes: dict[Hashable, _Episode] = {}
        self._jobs: dict[int, tuple[Hashable, int, str | None]] = {}
        """Of a job: its key, the number of its episode, and its answer (None: it resets)."""
        self._number = 0
        self._restored = 0

    def reset(self, key: Hashable, task: Mapping[str, Any]) -> None:
        """Begin an episode under a key that has none; never waits. Raises DataError for a row that is not JSON."""
        if key in self._episodes:
            raise ConfigError(f"the key {key!r} has an episode; drop it, or use another key")
        check_json(dict(task), "the row of the task")
        episode = _Episode(number=self._number, slot=self._number % self._workers, task=dict(task))
        self._episodes[key] = episode
        self._put(key, episode, {"do": "reset", "task": episode.task}, None)

    def step(self, key: Hashable, answer: str) -> None:
        """Give an episode the policy's answer; never waits."""
        episode = self._episodes.get(key)
        if episode is None or episode.busy:
            state = (
                "has no episode; reset it first"
                if episode is None
                else "waits for a reply; take its result first"
            )
            raise ConfigError(f"the key {key!r} {state}")
        episode.busy = True
        self._put(key, episode, {"do": "step", "answer": answer}, answer)

    def drop(self, key: Hashable) -> None:
        """End an episode, whose reply, if one is due, does not come any more. A key without one is no error."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            self._put(key, episode, {"do": "drop"}, None)

    def results(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Reply]]:
        """(key, reply) of what has ended, each once; waits at most `timeout_s` for the first process to answer."""
        found: list[tuple[Hashable, Reply]] = []
        for result in self._processes.get(timeout_s):
            key, number, answer = self._jobs.pop(result.number)
            episode = self._episodes.get(key)
            if episode is None or episode.number != number:
                continue  # it was dropped
            if result.reply.get("missing"):
                self._restored += 1
                restore = {"task": episode.task, "turns": episode.turns}
                assert answer is not None
                message = {"do": "step", "answer": answer, "restore": restore}
                self._put(key, episode, message, answer, self._limit * (len(episode.turns) + 2))
                continue
            reply = _reply(result.reply, result.failed, result.seconds)
            episode.busy = False
            if reply.failed is not None or (reply.turn is not None and reply.turn.done):
                del self._episodes[key]
            elif answer is not None:
                episode.turns.append((answer, result.reply))
            found.append((key, reply))
        return found

    @property
    def counters(self) -> dict[str, int]:
        """As `RewardPool.counters`, and `restored`: episodes that were repeated in a new process."""
        return {**self._processes.counters, "restored": self._restored}

    def close(self) -> None:
        """End the workers and all episodes."""
        super().close()
        self._episodes.clear()
        self._jobs.clear()

    def _put(
        self,
        key: Hashable,
        episode: _Episode,
        message: dict[str, Any],
        answer: str | None,
        limit_s: float | None = None,
    ) -> None:
        number = self._number
        self._number += 1
        self._jobs[number] = key, episode.number, answer
        job = Job(
            number=number, message={**message, "key": episode.number}, slot=episode.slot, limit_s=limit_s
        )
        self._processes.put([job])


def _reply(found: dict[str, Any], failed: str | None, seconds: float) -> Reply:
    failed = failed or found.get("failed")
    if failed is not None:
        return Reply(failed=failed, seconds=seconds)
    if "prompt" in found:
        return Reply(prompt=found["prompt"], seconds=seconds)
    turn = Turn(text=found["text"], message=found["message"], reward=found["reward"], done=found["done"])
    return Reply(turn=turn, seconds=seconds)
