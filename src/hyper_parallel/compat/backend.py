"""Back-end interface: everything the project may ask of a kind of device, its clocks, and the exceptions by which a
device or a peer fails.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hyper_parallel import proc
from hyper_parallel.compat.host_memory import HostMemory, HostPages, Unpin


class Event(Protocol):
    """A point in a stream's order. An event that was never recorded counts as reached.

    Streams and other events that its methods take are of the same back end.
    """

    def record(self, stream: Any = None) -> None:
        """Mark the work given to `stream` so far; None is the stream that the calling thread computes on."""

    def wait(self, stream: Any = None) -> None:
        """Let later work of `stream` begin only when the event is reached; None as in `record`."""

    def query(self) -> bool:
        """Whether the event is reached, without waiting."""

    def synchronize(self) -> None:
        """Block the calling thread until the event is reached."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`; both reached, and made with `timing=True`."""


class Stream(Protocol):
    """Work in order, beside the calling thread's own."""

    def run(self, work: Callable[[], object]) -> None:
        """Append `work`. On an accelerator it is called at once, and what it launches is queued."""

    def query(self) -> bool:
        """Whether all the work given so far is done, without waiting."""

    def synchronize(self) -> None:
        """Block until the work given so far is done; raises what that work raised."""


class Backend(ABC):
    """One kind of device. Indices count the devices that this process sees."""

    name: str
    """PyTorch's name of the device type."""
    collective: str
    """The library of `torch.distributed` that moves this device's tensors."""

    @property
    def process_group(self) -> str:
        """The argument of `init_process_group`: the device's library, and gloo for tensors on the host."""
        if self.name == "cpu":
            return self.collective
        return f"cpu:gloo,{self.name}:{self.collective}"

    @abstractmethod
    def available(self) -> bool:
        """Whether at least one device can be used. Never raises."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices that this process sees; 0 where there is none."""

    def devices_for(self, workers: int) -> bool:
        """Whether `workers` processes can each have a device of their own here."""
        return self.device_count() >= workers

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of the worker with this index on its machine."""

    @abstractmethod
    def set_device(self, device: torch.device) -> None:
        """Make `device` the current one of the calling thread."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all the work on the current device is done."""

    def OwnStream(self) -> Stream:
        """A stream for a thread that only copies: as `Stream`, but on the CPU its work is done where it is given."""
        return self.Stream()

    @abstractmethod
    def Stream(self) -> Stream:
        """A new stream on the current device."""

    @abstractmethod
    def Event(self, timing: bool = False) -> Event:
        """A new event; `timing` allows `elapsed_time`."""

    def Clock(self) -> Clock:
        """A new clock for the work of the calling thread on the current device."""
        return EventClock(self)

    @abstractmethod
    def memory_allocated(self) -> int:
        """Bytes that tensors of this process hold on the current device; on a CPU its resident memory."""

    @abstractmethod
    def memory_peak(self) -> int:
        """The most bytes that `memory_allocated` has been since the start or `reset_memory_peak`."""

    @abstractmethod
    def reset_memory_peak(self) -> None:
        """Begin a new peak at what is held now. Without effect where the system does not allow it."""

    @abstractmethod
    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy uint8 [n] to uint8 [n], between the device and the host, in the order of the current stream. It starts
        no threads."""

    @abstractmethod
    def return_memory(self, least: int = 1 << 18) -> None:
        """From now on blocks of at least `least` bytes that tensors let go return to the system at once, where the
        allocator keeps them otherwise, so that this process holds what its tensors hold.

        glibc before 2.38 finds no use for many of the smaller blocks that were let go (bug 14581): near a limit on the
        process, 16 KiB keep its heap from growing, and cost time for each block.
        """

    @abstractmethod
    def memory_total(self) -> int:
        """Bytes that the current device has."""

    @abstractmethod
    def memory_free(self) -> int:
        """Bytes that this process could still take on the current device."""

    @abstractmethod
    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised host tensor that the device copies to and from asynchronously (pinned)."""

    def pin(self, host: torch.Tensor) -> Unpin:
        """Lock host memory that is there already, so that copies to and from it are asynchronous; how to undo that.

        Does nothing where the device has no need of it or its runtime cannot: copies are right, and slower.
        """
        return lambda: None

    def host_pages(self, count: int) -> HostMemory:
        """Allocate `count` bytes of host memory with every page present, pinned for an accelerator. Raises OSError."""
        return HostPages(count, self.pin)

    def spare_cores(self) -> int:
        """Cores of this machine that are this process's share and compute nothing of a step."""
        return proc.cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))

    @abstractmethod
    def device_name(self, index: int = 0) -> str:
        """The maker's name of the device."""

    @abstractmethod
    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense FLOP/s of the current device in `dtype`; None where no published figure is known."""

    def environment(self, interface: str) -> dict[str, str]:
        """Variables that keep the collectives' own sockets on one network interface."""
        return {"GLOO_SOCKET_IFNAME": interface}

    def links(self) -> list[str]:
        """Direct links between the devices of this machine, in words; empty where unknown."""
        return []

    def driver(self) -> str | None:
        """Version of the driver or runtime; None where there is none."""
        return None


class Clock(Protocol):
    """Stamps the work that the calling thread gives to the current device."""

    def stamp(self) -> None:
        """Mark the end of the work given so far."""

    def read(self) -> list[float]:
        """Seconds from the first stamp to each, once all are reached; the clock is empty then."""


class HostClock:
    """Clock of a device that has done a piece of work when the call returns."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def stamp(self) -> None:
        """Mark the present."""
        self._times.append(time.perf_counter())

    def read(self) -> list[float]:
        """Seconds from the first stamp to each."""
        times, self._times = self._times, []
        return [at - times[0] for at in times]


class EventClock:
    """Clock of a device that runs behind the host: events on the stream that the thread computes on."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._events: list[Event] = []

    def stamp(self) -> None:
        """Record an event."""
        event = self._backend.Event(timing=True)
        event.record()
        self._events.append(event)

    def read(self) -> list[float]:
        """Seconds from the first event to each; waits for all work."""
        self._backend.synchronize()
        events, self._events = self._events, []
        return [events[0].elapsed_time(event) * 1e-3 for event in events]


# gloo raises a bare RuntimeError, which only its text tells from others.
_LOST = re.compile(
    r"gloo/|connection (was )?(closed|reset|refused)|connection lost|broken pipe"
    r"|nccl communicator was aborted|remote process exited|socket timeout|hccl.*(timeout|abort)",
    re.IGNORECASE,
)

_FULL = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is what a rank sees when *another* rank has gone, or never came."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, (RuntimeError, ConnectionError)) and _LOST.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory, or the host's, ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The host's allocator raises a bare RuntimeError; back ends outside of PyTorch say it in words of their own.
    return isinstance(error, RuntimeError) and _FULL.search(str(error)) is not None
