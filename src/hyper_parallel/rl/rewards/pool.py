"""A pool of processes that call a reward function, so that none of them can stop the controller.

A function that hangs, raises, returns no finite number or kills its process costs the reward of that sample only
(`processes` has the rules).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.rl.rewards.processes import Job
from hyper_parallel.rl.rewards.reward import Prompt, Reward
from hyper_parallel.rl.rewards.sandbox import check
from hyper_parallel.rl.rewards.worker_pool import WorkerPool, check_json

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
