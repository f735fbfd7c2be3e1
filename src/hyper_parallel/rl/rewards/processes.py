"""A pool of worker processes for functions that may hang, crash or raise, supervised by one thread.

The thread starts the workers, hands each idle one a batch of jobs, and enforces a time limit for each job: SIGKILL to
the worker's process group and a new worker. Only the job that ran is lost; the rest of its batch returns to the front
of the queue. A worker that dies loses its job only when the job has met that twice, since the cause may be another
process (memory). The workers are children of this thread and die with it (PR_SET_PDEATHSIG), and so with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.errors import ConfigError, LaunchError
from hyper_parallel.socket_frames import FrameEnd

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hyper_parallel.rl.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_START_S = 120.0
"""For a worker to import the user's code."""
_STARTS = 5
"""Workers in a row that end before they have answered, until the pool fails."""
_BATCH = 64
_REPLY = 16 << 20
"""Bytes of a reply."""


@dataclass(kw_only=True)
class Job:
    """A message for a worker."""

    number: int
    """The caller's; it comes back with the result."""
    message: dict[str, Any]
    limit_s: float | None = None
    """Its time limit, if it differs from the pool's."""
    slot: int | None = None
    """Of the worker that must take it; None: any."""
    deaths: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a job: a reply, or why there is none."""

    number: int
    reply: dict[str, Any]
    failed: str | None
    kind: str
    """Of failure: `raised`, `timed_out`, `died` or empty."""
    seconds: float


class Processes:
    """Worker processes with one queue of jobs. `put` and `get` may be called from any thread."""

    def __init__(
        self,
        factory: str,
        name: str,
        workers: int,
        time_limit_s: float,
        folder: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        what: str = "reward",
    ) -> None:
        """`factory`: `module:function` of the handler's factory, called with `name`, `folder` and `options` in each
        worker.

        Waits until all workers are ready. Raises ConfigError when the handler cannot be made, LaunchError when workers
        end before they answer.
        """
        if workers < 1:
            raise ConfigError(f"a pool of {workers} workers for a {what}; at least 1 is needed")
        if not time_limit_s > 0:
            raise ConfigError(f"the time limit of a {what} is {time_limit_s} s; it must be larger than 0")
        where = str(Path(folder or ".").absolute())
        self._start = {"factory": factory, "name": name, "folder": where, "options": dict(options or {})}
        self._limit, self._what, self._count = time_limit_s, what, workers
        self._jobs: dict[int | None, deque[Job]] = {slot: deque() for slot in (None, *range(workers))}
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._closing = False
        self._broken: BaseException | None = None
        self._ready = threading.Semaphore(0)
        self.counters = {"done": 0, "raised": 0, "timed_out": 0, "died": 0, "retried": 0, "restarts": 0}
        """Jobs by how they ended, jobs that were tried again, and workers that were started anew."""
        self._thread = threading.Thread(target=self._supervise, name=f"{what} pool", daemon=True)
        self._thread.start()
        for _ in range(workers):
            self._ready.acquire()
        if self._broken is not None:
            self.close()
            raise self._broken

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.process.pid for worker in list(self._workers)]

    def put(self, jobs: Iterable[Job]) -> None:
        """Queue jobs; never waits for a worker."""
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise LaunchError(f"the {self._what} pool is closed; make another one")
        with self._lock:
            for job in jobs:
                self._jobs[job.slot].append(job)
        self._rouse()

    def get(self, timeout_s: float = 0.0) -> list[Result]:
        """The results that have come; waits at most `timeout_s` for the first. Raises LaunchError if workers cannot be
        started again.
        """
        found: list[Result] = []
        with contextlib.suppress(queue.Empty):
            result = self._results.get(timeout=timeout_s) if timeout_s > 0 else self._results.get_nowait()
            while True:
                if isinstance(result, BaseException):
                    self._results.put(result)  # for the next call too
                    if found:
                        return found
                    raise result
                found.append(result)
                result = self._results.get_nowait()
        return found

    def close(self) -> None:
        """Kill the workers and wait for them. Jobs that have not ended are dropped."""
        self._closing = True
        self._rouse()
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyhow
            self._wake.send(b"\0")

    def _supervise(self) -> None:
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._selector = selectors.DefaultSelector()
        try:
            self._selector.register(self._woken, selectors.EVENT_READ)
            for slot in range(self._count):
                self._launch(slot)
            while not self._closing:
                self._round()
        except BaseException as error:
            self._broken = error
            self._results.put(error)
        finally:
            for worker in self._workers:
                worker.kill()
            self._selector.close()
            for _ in range(self._count):
                self._ready.release()

    def _round(self) -> None:
        self._hand_out()
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        wait = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, events in self._selector.select(wait):
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
                continue
            worker: _Worker = key.data
            if events & selectors.EVENT_WRITE:
                worker.end.flush()
                self._watch(worker)
            if events & selectors.EVENT_READ:
                replies, ended = worker.replies()
                for reply in replies:
                    self._take(worker, reply)
                if ended:
                    self._lost(worker)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline is not None and worker.deadline <= now:
                self._expired(worker)

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.ready and not worker.batch]
        with self._lock:
            share = -(-len(self._jobs[None]) // self._count)
            for worker in idle:
                own, common = self._jobs[worker.slot], self._jobs[None]
                batch = [own.popleft() for _ in range(min(len(own), _BATCH))]
                batch += [common.popleft() for _ in range(min(share, len(common), _BATCH - len(batch)))]
                if batch:
                    worker.give(batch, self._limit_of(batch[0]))
                    self._watch(worker)

    def _limit_of(self, job: Job) -> float:
        return self._limit if job.limit_s is None else job.limit_s

    def _take(self, worker: _Worker, reply: dict[str, Any]) -> None:
        if not worker.ready:
            if "error" in reply:
                raise ConfigError(reply["error"])
            worker.ready, worker.deadline = True, None
            self._failed_starts = 0
            self._ready.release()
            return
        job = worker.batch.popleft()
        worker.deadline = time.monotonic() + self._limit_of(worker.batch[0]) if worker.batch else None
        seconds, answer = reply["seconds"], reply["reply"]
        if "raised" in answer:
            self._finish(job, {}, f"it raised {answer['raised']}", "raised", seconds)
        else:
            self._finish(job, answer, None, "", seconds)

    def _finish(self, job: Job, reply: dict[str, Any], failed: str | None, kind: str, seconds: float) -> None:
        self.counters[kind or "done"] += 1
        self._results.put(Result(number=job.number, reply=reply, failed=failed, kind=kind, seconds=seconds))

    def _expired(self, worker: _Worker) -> None:
        if not worker.ready:
            raise LaunchError(
                f"a worker for the {self._what} did not start in {_START_S:g} s; see its module's imports"
            )
        job = worker.batch.popleft()
        self._replace(worker)
        limit = self._limit_of(job)
        self._finish(job, {}, f"it took longer than its limit of {limit:g} s", "timed_out", limit)

    def _lost(self, worker: _Worker) -> None:
        end = _status(worker.kill())
        job = None
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise LaunchError(
                    f"{_STARTS} workers for the {self._what} ended while they started, the last with {end}; "
                    "run its module with python to see why"
                )
        elif worker.batch:
            worker.batch[0].deaths += 1
            if worker.batch[0].deaths > 1:
                job = worker.batch.popleft()
            else:
                self.counters["retried"] += 1
        self._replace(worker)
        if job is not None:
            self._finish(job, {}, f"its process died twice, the second time with {end}", "died", 0.0)

    def _replace(self, worker: _Worker) -> None:
        with self._lock:
            for job in reversed(worker.batch):
                self._jobs[job.slot].appendleft(job)
        self._selector.unregister(worker.end)
        worker.kill()
        self._workers.remove(worker)
        self.counters["restarts"] += 1
        self._launch(worker.slot)

    def _launch(self, slot: int) -> None:
        worker = _Worker(slot, self._start)
        self._workers.append(worker)
        self._selector.register(worker.end, selectors.EVENT_READ, worker)
        self._watch(worker)

    def _watch(self, worker: _Worker) -> None:
        writes = selectors.EVENT_WRITE if worker.end.writes else 0
        self._selector.modify(worker.end, selectors.EVENT_READ | writes, worker)


class _Worker:
    """One process, its connection, and the jobs that it was given."""

    def __init__(self, slot: int, start: dict[str, Any]) -> None:
        self.slot = slot
        channel, theirs = socket.socketpair()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _BOOT,
                    json.dumps(sys.path),
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environ,
            )
        except OSError as error:
            channel.close()
            raise LaunchError(
                f"a worker process cannot start: {error.strerror}; free memory or processes"
            ) from error
        finally:
            theirs.close()
        self.end = FrameEnd(channel, largest=_REPLY)
        self.ready = False
        self.batch: deque[Job] = deque()
        self.deadline: float | None = time.monotonic() + _START_S
        self._put(start)

    def give(self, batch: list[Job], limit_s: float) -> None:
        """Send a batch; the time of its first job begins."""
        self.batch.extend(batch)
        self.deadline = time.monotonic() + limit_s
        self._put([job.message for job in batch])

    def _put(self, message: Any) -> None:
        self.end.put(json.dumps(message).encode())

    def replies(self) -> tuple[list[dict[str, Any]], bool]:
        """The replies that have come, and whether the connection has ended or what came is no reply."""
        found: list[dict[str, Any]] = []
        for body in self.end.receive():
            try:
                found.append(json.loads(body))
            except ValueError:  # the user's function wrote to the connection
                return found, True
        return found, not self.end.open

    def kill(self) -> int:
        """Kill the process group and wait; the exit status."""
        # A leader that was waited for has no group that is known to be its own.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.end.close()
        return self.process.returncode


def _status(code: int) -> str:
    names = {number.value: number.name for number in signal.Signals}
    return names.get(-code, f"signal {-code}") if code < 0 else f"exit code {code}"
