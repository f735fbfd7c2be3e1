"""Pool of processes that hold environments, with a time limit for each `reset` and `step`, and the scorer by it.

An episode stays in one process. When that process is killed (an environment of any episode hung) or dies, its other
episodes are repeated in the new process, from their task and answers, at their next step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyper_parallel.config.rl import TaskConfig
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.rl.controller.scorer import EVALUATION, Answers, Key, Scored, Scorer, first_turns
from hyper_parallel.rl.environments import Turn, prompt_of
from hyper_parallel.rl.rewards.pool import WorkerPool, check_json
from hyper_parallel.rl.rewards.processes import Job
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.sample import Appended


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


class EnvironmentScorer(Scorer):
    """An episode for each answer: it begins when the first turn has ended."""

    def __init__(self, task: TaskConfig, name: str, folder: Path | None = None) -> None:
        """Raises ConfigError for an unknown environment."""
        super().__init__(task.max_failed)
        self._pool = EnvironmentPool(
            name, workers=task.workers, time_limit_s=task.time_limit, folder=folder, options=task.options
        )
        self._first: dict[Key, tuple[Mapping[str, Any], str]] = {}
        """The task and first turn of episodes that are being reset."""
        self._prompts: dict[Key, Prompt] = {}
        self._rewards: dict[Key, float] = {}
        """Of the turns until now, of the episodes under way."""

    def begin_anew(self) -> None:
        """As `Scorer` has it. Episodes that are busy end with their next reply."""
        for key in [key for key in self._rewards if key not in self._asked]:
            self._end(key)
        super().begin_anew()

    def drop(self, ticket: int, places: Sequence[int]) -> None:
        """As `Scorer` has it. One that is busy is dropped when its reply has come, which nobody asked for."""
        for place in places:
            key = Key(self._life, ticket, place)
            if key in self._rewards and key not in self._asked:
                self._end(key)

    def all_of(
        self, answers: Answers, rows: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> list[float | None]:
        """As `Scorer` has it, turn by turn of all rows together."""
        asked = dict(enumerate(first_turns(rows)))
        found: dict[int, float | None] = {}
        while asked:
            given = dict(zip(asked, answers(list(asked.values())), strict=True))
            for place, answer in given.items():
                self._ask(Key(self._life, EVALUATION, place), rows[place], answer.text)
            for one in self._of_evaluation(len(given)):
                answer, place = given[one.place], one.place
                if one.appended is not None and len(answer.tokens) < max_tokens:
                    asked[place] = replace(asked[place], before=answer, appended=one.appended)
                    continue
                self._end(Key(self._life, EVALUATION, place))
                found[place] = one.reward
                del asked[place]
        return [found[place] for place in range(len(rows))]

    def close(self) -> None:
        """As `Scorer` has it."""
        self._pool.close()

    def _ask(self, key: Key, task: Mapping[str, Any], text: str) -> None:
        if key in self._rewards:
            self._pool.step(key, text)
            return
        self._rewards[key] = 0.0
        self._prompts[key] = prompt_of(task)
        self._first[key] = task, text
        self._pool.reset(key, task)

    def _arrived(self, timeout_s: float) -> list[tuple[Key, Scored]]:
        found = []
        for key, reply in self._pool.results(timeout_s):
            assert isinstance(key, Key)
            if key.life != self._life:
                self._first.pop(key, None)
                self._end(key)
            elif (one := self._reply(key, reply)) is not None:
                found.append((key, one))
        return found

    def _reply(self, key: Key, reply: Reply) -> Scored | None:
        """None where the episode's first turn is asked about now."""
        if reply.failed is not None:
            self._failure(reply.failed, self._prompts.pop(key))
            self._first.pop(key, None)
            del self._rewards[key]
            return Scored(key.ticket, key.place, None, failed=reply.failed)
        if reply.turn is None:
            task, text = self._first.pop(key)
            if reply.prompt != task["prompt"]:
                raise DataError(
                    f"the environment begins with {reply.prompt!r:.80}, and the row's prompt is "
                    f"{task['prompt']!r:.80}; give the row's own prompt in reset"
                )
            self._pool.step(key, text)
            return None
        self._rewards[key] += reply.turn.reward
        if not reply.turn.done:
            appended = _appended(self._prompts[key], reply.turn)
            return Scored(key.ticket, key.place, self._rewards[key], appended)
        del self._prompts[key]
        return Scored(key.ticket, key.place, self._rewards.pop(key))

    def _end(self, key: Key) -> None:
        if self._rewards.pop(key, None) is not None:
            del self._prompts[key]
            self._pool.drop(key)


def _appended(prompt: Prompt, turn: Turn) -> Appended:
    """What the policy reads next. Raises DataError for a message behind a text."""
    if not isinstance(prompt, str):
        return turn.message or {"role": "user", "content": turn.text}
    if turn.message is not None:
        raise DataError(
            f"the environment gives a message of the role {turn.message['role']!r}, and the row's prompt is a text; "
            "write the prompt as a list of messages, or give a text"
        )
    return turn.text
