"""The CPU as a back end: gloo, streams and events by threads, the process's resident memory.

The threads of a stream, and others that work in the background (`start_thread`), end before the interpreter does.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import os
import platform
import resource
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hyper_parallel.compat.backend import Backend, HostClock
from hyper_parallel.compat.host_memory import return_freed_memory
from hyper_parallel.proc import MEMORY, PROCESS, bytes_in


class CpuBackend(Backend):
    """Every worker computes on the same CPU; how many threads each has is the launcher's matter."""

    name = "cpu"
    collective = "gloo"

    def available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def devices_for(self, workers: int) -> bool:
        return True

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        pass  # there is only one

    def synchronize(self) -> None:
        synchronize_all()

    def Stream(self) -> CpuStream:
        return CpuStream()

    def OwnStream(self) -> HereStream:
        return HereStream()

    def Event(self, timing: bool = False) -> CpuEvent:
        return CpuEvent(timing)

    def Clock(self) -> HostClock:
        return HostClock()

    def memory_allocated(self) -> int:
        resident = _status_bytes("VmRSS")
        return resident if resident is not None else _high_water_mark()

    def memory_peak(self) -> int:
        peak = _status_bytes("VmHWM")
        return peak if peak is not None else _high_water_mark()

    def reset_memory_peak(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM to VmRSS

    def spare_cores(self) -> int:
        return max(0, super().spare_cores() - torch.get_num_threads())

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # `copy_` would start a thread pool for each thread that calls it, with 8 MiB of stack per thread, and a storage
        # cannot be resized after `numpy()`. `memmove` releases the GIL.
        assert target.numel() == source.numel(), f"{source.numel()} bytes to {target.numel()}"
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def return_memory(self, least: int = 1 << 18) -> None:
        return_freed_memory(least)

    def memory_total(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_free(self) -> int:
        # Without swapping, and below the limit on the process's data (setrlimit(2)).
        free = bytes_in(MEMORY, "MemAvailable")
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        found = [self.memory_total() if free is None else free]
        if limit != resource.RLIM_INFINITY:
            found.append(max(limit - (_status_bytes("VmData") or 0), 0))
        return min(found)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)  # host memory is the device's memory

    def device_name(self, index: int = 0) -> str:
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return None  # clock and vector width vary too much for a figure that MFU could rest on


def _status_bytes(key: str) -> int | None:
    return bytes_in(PROCESS, key)


def _high_water_mark() -> int:
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# Streams and events for the CPU: a thread with a queue, and condition variables.
#
# The semantics are an accelerator's. Order is kept within a stream; across streams only events order. An event
# stands for the work given before its last `record`; one never recorded counts as reached. The calling thread
# is the default stream: `record(None)` is reached at once and `wait(None)` blocks.
#
# Work that raises ends its stream: what was queued behind it is dropped, since it may read what was never
# written. Events behind it are reached *as failed*, so that nobody waits for ever; a stream that waits for one
# fails with the same exception. `synchronize` of the stream, of the event, or of the back end raises that
# exception with the traceback of the work. Once its own `synchronize` has raised, a stream takes work again.

_Item = Callable[[], None]


class _Mark:
    """One recording of an event."""

    def __init__(self, source: _Queue | None) -> None:
        self.source = source
        self.failure: BaseException | None = None
        self.time_s = 0.0
        self._reached = threading.Event()

    def reach(self, failure: BaseException | None) -> None:
        self.time_s = time.perf_counter()
        self.failure = failure
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def block(self) -> BaseException | None:
        assert self.source is None or self.source.thread is not threading.current_thread() or self.query(), (
            "a stream's work waits for a later point of the same stream"
        )
        self._reached.wait()
        return self.failure


class _Queue:
    """The queue that the thread of a stream shares with the stream; the thread holds no reference to the stream."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.items: deque[_Item] = deque()
        self.pending = 0
        self.failure: BaseException | None = None
        self.closed = False
        self.thread: threading.Thread | None = None

    def put(self, item: _Item) -> None:
        with self.condition:
            if self.closed:  # abandoned, at exit: nothing is done any more, and nobody waits for ever
                item()
                return
            self.items.append(item)
            self.pending += 1
            if self.thread is None:
                self.thread = start_thread(self.serve, "cpu-stream", self.abandon)
            self.condition.notify_all()

    def serve(self) -> None:
        while True:
            with self.condition:
                while not self.items and not self.closed:
                    self.condition.wait()
                if not self.items:
                    return
                item = self.items.popleft()
            item()
            del item  # a finished item must not keep its tensors alive until the next one comes
            with self.condition:
                self.pending -= 1
                self.condition.notify_all()

    def close(self) -> None:
        with self.condition:
            self.closed = True
            self.condition.notify_all()

    def abandon(self) -> None:
        """Close the queue and fail the work that has not begun, so that its waiters raise."""
        self.fail(RuntimeError("the process is ending"))
        self.close()

    def fail(self, failure: BaseException) -> None:
        with self.condition:
            if self.failure is None:
                self.failure = failure


_live: weakref.WeakSet[CpuStream] = weakref.WeakSet()


class CpuStream:
    """A thread that does what it is given, in order. It ends when the stream is collected."""

    def __init__(self) -> None:
        self._queue = _Queue()
        weakref.finalize(self, self._queue.close)
        _live.add(self)

    def run(self, work: Callable[[], object]) -> None:
        """Append `work`; it sees the caller's context variables and gradient mode."""
        queue, context, gradients = self._queue, contextvars.copy_context(), torch.is_grad_enabled()

        def item() -> None:
            if queue.failure is not None:
                return
            try:
                with torch.set_grad_enabled(gradients):
                    context.run(work)
            except BaseException as failure:
                queue.fail(failure)

        queue.put(item)

    def query(self) -> bool:
        """Whether everything given so far is done, failed or dropped."""
        with self._queue.condition:
            return self._queue.pending == 0

    def synchronize(self) -> None:
        """Wait for everything given so far; raises, once, what the work raised."""
        queue = self._queue
        assert queue.thread is not threading.current_thread(), "a stream's work waits for its own stream"
        mark = _Mark(queue)
        queue.put(lambda: mark.reach(queue.failure))
        failure = mark.block()
        if failure is not None:
            with queue.condition:
                queue.failure = None
            raise failure


class HereStream:
    """The calling thread itself as a stream: work is done when it is given."""

    def run(self, work: Callable[[], object]) -> None:
        """Do `work`; raises what it raises."""
        work()

    def query(self) -> bool:
        """Always true."""
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class CpuEvent:
    """A point in a CpuStream's order, or in the calling thread's."""

    def __init__(self, timing: bool = False) -> None:
        self._timing = timing
        self._mark: _Mark | None = None

    def record(self, stream: CpuStream | None = None) -> None:
        """Mark the work given to `stream` so far, replacing an earlier recording."""
        if stream is None:
            mark = _Mark(None)
            mark.reach(None)
        else:
            queue = stream._queue
            mark = _Mark(queue)
            queue.put(lambda: mark.reach(queue.failure))
        self._mark = mark

    def wait(self, stream: CpuStream | None = None) -> None:
        """Let later work of `stream`, or the calling thread, go on when the event is reached."""
        mark = self._mark
        if mark is None:
            return
        if stream is None:
            self.synchronize()
            return
        queue = stream._queue
        if mark.source is queue:
            return  # order within the stream says it already

        def item() -> None:
            failure = mark.block()
            if failure is not None:
                queue.fail(failure)

        queue.put(item)

    def query(self) -> bool:
        """Whether the last recording is reached."""
        return self._mark is None or self._mark.query()

    def synchronize(self) -> None:
        """Wait for the last recording; raises what the work before it raised."""
        if self._mark is not None:
            failure = self._mark.block()
            if failure is not None:
                raise failure

    def elapsed_time(self, end: CpuEvent) -> float:
        """Milliseconds between the two recordings. Raises RuntimeError unless both are timed and reached."""
        if not (self._timing and end._timing):
            raise RuntimeError("elapsed_time needs two events that were made with timing=True")
        if self._mark is None or end._mark is None or not (self.query() and end.query()):
            raise RuntimeError("elapsed_time needs two events that were recorded and are reached")
        return (end._mark.time_s - self._mark.time_s) * 1e3


def synchronize_all() -> None:
    """Wait for every stream of the process; raises the first failure found, after waiting for all."""
    failures: list[BaseException] = []
    for stream in list(_live):
        try:
            stream.synchronize()
        except BaseException as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


# Threads in the background that are over before the interpreter is.
#
# While it shuts down, CPython ends a daemon thread at the moment it asks for the interpreter's lock. Where that is on
# the way out of a C++ function, as in most of PyTorch's, the whole process aborts ("terminate called without an active
# exception"): a plain Ctrl-C becomes a core dump. A non-daemon thread would keep the process from ending instead. These
# threads are therefore daemons that are asked to end, and joined, at exit. A thread that does not end, for example
# because its disk does not answer, delays the exit by at most `PATIENCE` seconds.

PATIENCE = 10.0
"""Seconds for all threads together, at exit."""

_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = weakref.WeakKeyDictionary()


def start_thread(
    target: Callable[[], None], name: str, end: Callable[[], None], stack: int = 0
) -> threading.Thread:
    """Run `target` in a thread. `end` is called at exit, while it still runs: it drops what has not begun and lets
    `target` return. Neither may refer to an object whose collection is to end the thread. `stack`: its bytes; 0 is
    the platform's."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    _running[thread] = end
    usual = threading.stack_size(stack)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread


@atexit.register
def _end_threads() -> None:
    running = [(thread, end) for thread, end in list(_running.items()) if thread.is_alive()]
    for _, end in running:
        with contextlib.suppress(Exception):
            end()
    until = time.monotonic() + PATIENCE
    for thread, _ in running:
        if thread is not threading.current_thread():
            thread.join(max(until - time.monotonic(), 0.0))
