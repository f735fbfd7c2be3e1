"""Pool of processes that call a reward function, so that none of them can stop the controller.

A function that hangs, raises, returns no finite number or kills its process costs the reward of that sample only
(`processes` has the rules).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.processes import Job, Processes
from hyper_parallel.rl.rewards.reward import Prompt, Reward
from hyper_parallel.rl.rewards.sandbox import check


class WorkerPool:
    """A context manager: its processes end with it."""

    def __init__(
        self,
        handler: str,
        name: str,
        *,
        workers: int,
        time_limit_s: float,
        folder: str | Path | None,
        options: Mapping[str, Any] | None,
        what: str,
    ) -> None:
        """`handler`: makes the workers' handler from a name and a folder. `what`: the noun of messages. Returns when
        all workers have imported what is named; raises ConfigError if they cannot."""
        check_json(dict(options or {}), f"the options of the {what}")
        self._processes = Processes(handler, name, workers, time_limit_s, folder, options, what=what)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._processes.pids

    def close(self) -> None:
        """End the workers; what has no result is dropped."""
        self._processes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_json(message: Any, what: str) -> None:
    """Raise DataError for what cannot be sent to a worker."""
    try:
        json.dumps(message)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what} cannot be sent to a process, being no JSON: {error}; use plain values"
        ) from error


Request = tuple[Hashable, Prompt, str, Mapping[str, Any]]
"""(key, prompt, answer, task)."""


class RewardPool(WorkerPool):
    """Worker processes for one reward function. Close it, or use it as a context manager."""

    def __init__(
        self,
        name: str,
        *,
        workers: int = 2,
        time_limit_s: float = 10.0,
        folder: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`name`, `folder`, `options`: as `load_reward`. `time_limit_s`: for each call.

        Returns when all workers have imported the function. Raises ConfigError, in one line, if they cannot, and for
        `code` with the option `isolation="required"` where the machine does not isolate.
        """
        if name == "code":
            check((options or {}).get("isolation", "preferred"))
        super().__init__(
            "hyper_parallel.rl.rewards.worker:rewards",
            name,
            workers=workers,
            time_limit_s=time_limit_s,
            folder=folder,
            options=options,
            what="reward",
        )
        self._keys: dict[int, Hashable] = {}
        self._number = 0
        self._not_a_number = 0

    def submit(self, key: Hashable, prompt: Prompt, answer: str, task: Mapping[str, Any]) -> None:
        """Queue one sample; never waits. Raises DataError for what JSON cannot hold."""
        self.submit_many([(key, prompt, answer, task)])

    def submit_many(self, requests: Iterable[Request]) -> None:
        """Queue samples, which reach the workers in batches; never waits."""
        jobs: list[Job] = []
        for key, prompt, answer, task in requests:
            message = {"prompt": prompt, "answer": answer, "task": dict(task)}
            check_json(message, "the prompt, the answer or the row of the task")
            jobs.append(Job(number=self._number, message=message))
            self._keys[self._number] = key
            self._number += 1
        self._processes.put(jobs)

    def results(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Reward]]:
        """(key, reward) of the samples that have ended, each once; waits at most `timeout_s` for the first."""
        found: list[tuple[Hashable, Reward]] = []
        for result in self._processes.get(timeout_s):
            failed = result.failed or result.reply.get("failed")
            self._not_a_number += result.failed is None and failed is not None
            reward = Reward(value=result.reply.get("value"), failed=failed, seconds=result.seconds)
            found.append((self._keys.pop(result.number), reward))
        return found

    @property
    def waiting(self) -> int:
        """Samples that were submitted and whose results were not taken."""
        return len(self._keys)

    @property
    def counters(self) -> dict[str, int]:
        """`done`, `not_a_number` (of those done), `raised`, `timed_out`, `died`, `retried`, `restarts`."""
        return {**self._processes.counters, "not_a_number": self._not_a_number}

    def close(self) -> None:
        """End the workers; samples without a result are dropped."""
        super().close()
        self._keys.clear()
