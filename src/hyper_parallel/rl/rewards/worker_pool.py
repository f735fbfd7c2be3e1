"""Base of the pools of worker processes: their start, the ids of the processes, their end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.processes import Processes


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
