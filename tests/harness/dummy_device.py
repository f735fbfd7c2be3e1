"""A dummy accelerator on PyTorch's PrivateUse1 slot: streams, events and memory functions in Python.

`install()` renames PrivateUse1 to `dummy` and gives it a module with the functions that PyTorch expects of
device modules, as an out-of-tree accelerator does. It can be done once a process, so tests use a subprocess.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
import torch.distributed as dist

from hyper_parallel.compat.cpu import CpuEvent, CpuStream, synchronize_all

COLLECTIVE = "dummyccl"
_state = threading.local()
_memory = {"now": 0, "peak": 0}


class Stream:
    """The stream class of `torch.dummy`."""

    def __init__(self) -> None:
        self.queue = CpuStream()

    def wait_event(self, event: Event) -> None:
        event.inner.wait(self.queue)

    def query(self) -> bool:
        return self.queue.query()

    def synchronize(self) -> None:
        self.queue.synchronize()


class Event:
    """The event class of `torch.dummy`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.inner = CpuEvent(enable_timing)

    def record(self, stream: Stream | None = None) -> None:
        self.inner.record((stream or current_stream()).queue)

    def query(self) -> bool:
        return self.inner.query()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return self.inner.elapsed_time(end.inner)


_default = Stream()


def current_stream() -> Stream:
    return getattr(_state, "stream", _default)


@contextlib.contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    previous = current_stream()
    _state.stream = stream
    try:
        yield
    finally:
        _state.stream = previous


def launch(kernel: Callable[[], object]) -> None:
    """A kernel launch: queued on the current stream."""
    current_stream().queue.run(kernel)


def allocate(size: int) -> None:
    """Bytes taken (or, negative, given back) on the dummy's memory."""
    _memory["now"] += size
    _memory["peak"] = max(_memory["peak"], _memory["now"])


def install() -> None:
    """Rename PrivateUse1, register its module, and its collective library (gloo under another name)."""
    module = ModuleType("torch.dummy")
    module.Stream = Stream  # type: ignore[attr-defined]
    module.Event = Event  # type: ignore[attr-defined]
    module.stream = _stream  # type: ignore[attr-defined]
    module.current_stream = current_stream  # type: ignore[attr-defined]
    module.synchronize = synchronize_all  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 2  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module.set_device = lambda device: None  # type: ignore[attr-defined]
    module.get_device_name = lambda index=0: "Dummy 1"  # type: ignore[attr-defined]
    module.memory_allocated = lambda: _memory["now"]  # type: ignore[attr-defined]
    module.max_memory_allocated = lambda: _memory["peak"]  # type: ignore[attr-defined]
    module.reset_peak_memory_stats = lambda: _memory.update(peak=_memory["now"])  # type: ignore[attr-defined]
    module.mem_get_info = lambda: (2**30 - _memory["now"], 2**30)  # type: ignore[attr-defined]
    torch.utils.rename_privateuse1_backend("dummy")
    torch._register_device_module("dummy", module)
    dist.Backend.register_backend(
        COLLECTIVE,
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
        devices=["dummy"],
    )
