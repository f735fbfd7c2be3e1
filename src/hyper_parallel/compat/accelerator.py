"""Accelerators that PyTorch knows: one class, given the torch namespace that holds their functions.

`torch.cuda`, `torch.npu` and the module of a PrivateUse1 device have the same functions by PyTorch's own
convention for device modules, so that a new accelerator is `register(name, lambda: TorchBackend(...))`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from hyper_parallel.cluster.presets import peak_flops
from hyper_parallel.compat.backend import Backend
from hyper_parallel.compat.host_memory import HostMemory, TorchPages, Unpin
from hyper_parallel.units import format_bytes

log = logging.getLogger(__name__)


class TorchStream:
    """A stream of an accelerator's torch namespace."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.native: Any = module.Stream()

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` with this stream current: what it launches is queued here."""
        with self._module.stream(self.native):
            work()

    def query(self) -> bool:
        """Whether all the work given so far is done."""
        return bool(self.native.query())

    def synchronize(self) -> None:
        """Block until the work given so far is done."""
        self.native.synchronize()


class TorchEvent:
    """An event of an accelerator's torch namespace."""

    def __init__(self, module: ModuleType, timing: bool) -> None:
        self._module = module
        self.native: Any = module.Event(enable_timing=timing)

    def record(self, stream: TorchStream | None = None) -> None:
        """Mark the work given so far to `stream`, or to the current one."""
        self.native.record(self._native(stream))

    def wait(self, stream: TorchStream | None = None) -> None:
        """Let later work of `stream`, or of the current one, wait for the event."""
        self._native(stream).wait_event(self.native)

    def query(self) -> bool:
        """Whether the event is reached."""
        return bool(self.native.query())

    def synchronize(self) -> None:
        """Block until the event is reached."""
        self.native.synchronize()

    def elapsed_time(self, end: TorchEvent) -> float:
        """Milliseconds from this event to `end`."""
        return float(self.native.elapsed_time(end.native))

    def _native(self, stream: TorchStream | None) -> Any:
        return self._module.current_stream() if stream is None else stream.native


class TorchBackend(Backend):
    """An accelerator behind a torch namespace.

    `name` is the device type and the namespace's name in `torch`; `extension` is a package whose import adds
    it; `socket_variable` is the environment variable that ties the collective library to a network interface.
    """

    def __init__(
        self, name: str, collective: str, extension: str | None = None, socket_variable: str | None = None
    ) -> None:
        self.name = name
        self.collective = collective
        self._extension = extension
        self._socket_variable = socket_variable

    @property
    def module(self) -> ModuleType:
        """The torch namespace. Raises ImportError or AttributeError where the extension is not installed."""
        if self._extension is not None:
            importlib.import_module(self._extension)
        module: ModuleType = getattr(torch, self.name)
        return module

    def available(self) -> bool:
        # A broken extension raises whatever its maker chose; it must not stop a run on another device.
        with contextlib.suppress(Exception):
            return bool(self.module.is_available())
        return False

    def device_count(self) -> int:
        return int(self.module.device_count()) if self.available() else 0

    def device(self, local_rank: int) -> torch.device:
        return torch.device(self.name, local_rank)

    def set_device(self, device: torch.device) -> None:
        self.module.set_device(device)

    def synchronize(self) -> None:
        self.module.synchronize()

    def Stream(self) -> TorchStream:
        return TorchStream(self.module)

    def Event(self, timing: bool = False) -> TorchEvent:
        return TorchEvent(self.module, timing)

    def memory_allocated(self) -> int:
        return int(self.module.memory_allocated())

    def memory_peak(self) -> int:
        return int(self.module.max_memory_allocated())

    def reset_memory_peak(self) -> None:
        self.module.reset_peak_memory_stats()

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def return_memory(self, least: int = 1 << 18) -> None:
        pass  # what a block that was let go leaves free serves the next tensor of this process

    def memory_total(self) -> int:
        return int(self.module.mem_get_info()[1])

    def memory_free(self) -> int:
        # What the allocator holds and nothing uses is free for tensors, too.
        unused = int(self.module.memory_reserved()) - int(self.module.memory_allocated())
        return int(self.module.mem_get_info()[0]) + unused

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def pin(self, host: torch.Tensor) -> Unpin:
        if not self._locks_pages or not host.numel():
            return super().pin(host)
        runtime, address = self.module.cudart(), host.data_ptr()
        if int(runtime.cudaHostRegister(address, host.nbytes, 1)):  # 1: for every context of the process
            log.warning(
                "%s of host memory could not be locked: copies to it wait for the device",
                format_bytes(host.nbytes),
            )
            return super().pin(host)
        return lambda: runtime.cudaHostUnregister(address)

    def host_pages(self, count: int) -> HostMemory:
        return super().host_pages(count) if self._locks_pages else TorchPages(count)

    @property
    def _locks_pages(self) -> bool:
        return hasattr(self.module, "cudart")

    def device_name(self, index: int = 0) -> str:
        return str(self.module.get_device_name(index))

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return peak_flops(self.device_name(self.module.current_device()), str(dtype).removeprefix("torch."))

    def environment(self, interface: str) -> dict[str, str]:
        variables = super().environment(interface)
        if self._socket_variable is not None:
            variables[self._socket_variable] = interface
        return variables

    def links(self) -> list[str]:
        reachable = getattr(self.module, "can_device_access_peer", None)
        if reachable is None:
            return []
        count = self.device_count()
        return [
            f"{first} ↔ {second}: direct access"
            for first in range(count)
            for second in range(first + 1, count)
            if reachable(first, second)
        ]

    def driver(self) -> str | None:
        version = getattr(torch.version, self.name, None)
        return f"{self.name} {version}" if version else None
