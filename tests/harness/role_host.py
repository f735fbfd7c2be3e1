"""Host objects for tests of groups of workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.launch import Worker


class RoleHost:
    """Operations that compute, fail, hang and die."""

    def __init__(self, config: RoleLaunch, worker: Worker) -> None:
        self.settings, self.worker = config.settings, worker
        self.state = 0
        if self.settings.get("refuses") == worker.rank:
            raise ConfigError("the model does not fit; make it smaller")
        if self.settings.get("crashes") == worker.rank:
            raise ValueError("the defect")
        if self.settings.get("dies") == worker.rank:
            os._exit(3)

    def facts(self) -> dict[str, Any]:
        """This worker's place."""
        worker = self.worker
        return {
            "rank": worker.rank,
            "world": dist.get_world_size(),
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "settings": self.settings,
        }

    def add(self, value: int) -> int:
        """Keeps state between calls."""
        self.state += value
        return self.state

    def total(self, value: float) -> float:
        """A collective over the group."""
        found = torch.tensor([value + self.worker.rank], dtype=torch.float64)
        dist.all_reduce(found)
        return found.item()

    def echo(self, data: Any) -> Any:
        """Gives back what it got."""
        return data

    def tensor(self) -> torch.Tensor:
        """What a controller cannot take."""
        return torch.ones(1)

    def wrong(self, rank: int) -> None:
        """A user's error on one rank, while the others wait for it."""
        if rank in (self.worker.rank, -1):
            raise DataError("corpus.txt is empty;\ngive a file with text")
        dist.barrier()

    def crash(self) -> None:
        """A defect."""
        raise KeyError("the defect")

    def die(self, rank: int, number: int = signal.SIGKILL) -> None:
        """One rank gets a signal, while the others wait for it."""
        if rank == self.worker.rank:
            # To this thread: a signal to the process may stop another thread first, and this one would still reach the
            # barrier and let the others go.
            signal.pthread_kill(threading.get_ident(), number)
        dist.barrier()

    def sleep(self, seconds: float) -> None:
        """Takes its time."""
        time.sleep(seconds)

    def note(self, path: str) -> None:
        """Leaves its process id."""
        Path(f"{path}-{self.worker.rank}").write_text(str(os.getpid()))

    def say(self, text: str) -> None:
        """Prints."""
        print(text, self.worker.rank)
