"""The CPU as a back end: gloo, streams by threads, the process's resident memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hyper_parallel.compat.backend import Backend
from hyper_parallel.compat.cpu_streams import CpuEvent, CpuStream, HereStream, synchronize_all
from hyper_parallel.compat.events import HostClock
from hyper_parallel.proc import MEMORY, PROCESS, bytes_in

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), from glibc's malloc.h."""


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
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            library = ctypes.CDLL(None)
            library.mallopt(_M_MMAP_THRESHOLD, least)
            library.mallopt(_M_TRIM_THRESHOLD, least)

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
