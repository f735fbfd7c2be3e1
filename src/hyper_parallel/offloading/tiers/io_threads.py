"""I/O threads between a device and a file, each with a bounce buffer.

While one lane waits for the disk, another copies to or from the device. Parts begin in the order in which they were
given; with several lanes one may end before an earlier one.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

from hyper_parallel.compat import Backend, Stream, threads
from hyper_parallel.compat.pinned_memory import HostMemory

Job = Callable[[torch.Tensor, Stream], None]
"""Carries one part, given a page-aligned buffer, uint8 [bytes], and a stream for the device's side. Raises nothing."""

_STACK = 2**20
"""Bytes of a lane's stack, which counts against limits on a process's memory; the usual 8 MiB exceed its buffer."""


class Lanes:
    """`count` lanes with buffers of `size` bytes."""

    def __init__(self, backend: Backend, count: int, size: int) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended, self._lock = 0.0, threading.Lock()
        """When the last thing that was carried as a whole was over."""
        self._end = weakref.finalize(self, _stop, self._jobs, count)
        self._end.atexit = False  # then they are abandoned
        self._ending = threading.Event()
        abandon = partial(_abandon, self._jobs, count, self._ending)
        self._threads = [
            threads.start(
                partial(_serve, self._jobs, backend.host_pages(size), backend.OwnStream()),
                "tier-lane",
                abandon,
                _STACK,
            )
            for _ in range(count)
        ]

    def put(self, job: Job) -> None:
        """Carry a part after those given before."""
        self._jobs.put(job)

    @property
    def ending(self) -> bool:
        """Whether the process ends: a job that has not begun should do nothing but say so."""
        return self._ending.is_set()

    def ended(self, began: float) -> float:
        """Note that what began then is over now; the seconds in which the lanes were its own. The next thing begins on
        one lane while this one ends on another: from then on to the end they are still this one's."""
        with self._lock:
            now = time.perf_counter()
            since, self._ended = max(began, self._ended), now
        return now - since

    def close(self, limit: float) -> None:
        """End the threads after what they were given; waits for them, `limit` seconds at most."""
        self._end()
        until = time.monotonic() + limit
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))


def _serve(jobs: SimpleQueue[Job | None], buffer: HostMemory, stream: Stream) -> None:
    while (job := jobs.get()) is not None:
        job(buffer.tensor, stream)
        del job  # it must not keep its tensor alive until the next one comes
    buffer.close()


def _stop(jobs: SimpleQueue[Job | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)


def _abandon(jobs: SimpleQueue[Job | None], count: int, ending: threading.Event) -> None:
    ending.set()
    _stop(jobs, count)
