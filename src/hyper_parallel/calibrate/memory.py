"""Memory benchmarks: bandwidth, first-touch cost, optimizer update, copies between tiers."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from hyper_parallel.calibrate.results import Results
from hyper_parallel.calibrate.timing import Timer, filled, in_turns
from hyper_parallel.compat.foreach_kernels import adamw_

_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1  # mallopt(3)


def sizes(level: str) -> tuple[int, ...]:
    """Buffer size in bytes."""
    return {
        "full": (2**16, 2**20, 2**22, 2**24, 2**25, 2**26),
        "shared": (2**16, 2**20, 2**24, 2**25, 2**26),
        "quick": (2**20, 2**24),
        "tiny": (2**16, 2**20),
    }[level]


def measure_fresh(device: torch.device, level: str, results: Results) -> None:
    """Extra seconds by ("fresh", bytes) of the first write into a newly allocated buffer, compared with the second.

    The buffer replaces one that was just freed, as in a warm step: pages that the allocator kept are mapped, and
    pages that it gave back to the system must be mapped again. Call it before `keep_freed_memory`.
    """
    # A block as large as a model's, freed, sets the allocator's thresholds to what they are in training.
    block = filled(((2**25 if level != "tiny" else 2**20) // 4,), torch.float32, device)
    del block
    for size in sizes(level):
        extra = []
        for _ in range(9):
            started = time.perf_counter()
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            buffer.fill_(1)
            middle = time.perf_counter()
            buffer.fill_(2)
            extra.append(2 * middle - started - time.perf_counter())
            del buffer
        extra = sorted(extra[1:])
        median = max(extra[len(extra) // 2], 1e-9)
        results.add(("fresh", size), median, (extra[-1] - extra[0]) / median)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory, so that later measurements touch no new pages. No effect without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def measure_bandwidth(timer: Timer, device: torch.device, level: str, results: Results) -> None:
    """Seconds by ("copied", bytes read and written), far larger than caches; ("vector",) of 2²⁰ FLOPs within them."""
    size = {"full": 2**27, "shared": 2**26, "quick": 2**26, "tiny": 2**20}[level]
    source = filled((size // 4,), torch.float32, device)
    target = torch.empty_like(source)
    sample = timer.of(lambda: target.copy_(source))
    results.add(("copied", 2 * size), sample.seconds, sample.spread)
    small = filled((2**16,), torch.float32, device)
    sample = timer.of(lambda: small.mul_(1.0))
    results.add(("vector",), sample.seconds * 16, sample.spread)


def measure_optimizer(timer: Timer, device: torch.device, level: str, results: Results) -> None:
    """Seconds by ("optimizer", bytes read, bytes written) of a fused AdamW update of one tensor, its count included."""
    for size in sizes(level):
        parameter, gradient, first = (filled((size // 4,), torch.float32, device) for _ in range(3))
        turns = in_turns((torch.zeros((), device=device), parameter, gradient, first, gradient.square()))

        def step(turns: Iterator[tuple[torch.Tensor, ...]] = turns) -> None:
            count, *state = next(turns)
            adamw_(
                *([one] for one in (*state, count)), lr=1e-9, betas=(0.9, 0.99), weight_decay=0.0, eps=1e-8
            )

        sample = timer.of(step)
        results.add(("optimizer", 4 * size, 3 * size), sample.seconds, sample.spread)


def measure_copies(timer: Timer, device: torch.device, level: str, results: Results) -> None:
    """Seconds by ("copy", source, target, bytes) between the device and the host."""
    for size in sizes(level):
        here = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        there = timer.backend.host_buffer((size,), torch.uint8)
        there.fill_(1)
        for source, target, call in (
            ("device", "host", lambda here=here, there=there: there.copy_(here)),
            ("host", "device", lambda here=here, there=there: here.copy_(there)),
        ):
            sample = timer.of(call)
            results.add(("copy", source, target, size), sample.seconds, sample.spread)


def measure_flash(folder: Path, level: str, results: Results) -> None:
    """Seconds by ("copy", "host" or "flash", the other, bytes), past the page cache where the system allows it."""
    direct = getattr(os, "O_DIRECT", 0)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="calibrate-") as file:
        try:
            handle = os.open(file.name, os.O_RDWR | direct)
        except OSError:
            handle, direct = os.open(file.name, os.O_RDWR), 0
        if not direct:
            results.notes.append("the file system has no direct access: flash was measured through its cache")
        try:
            for size in sizes(level):
                with mmap.mmap(-1, size) as buffer:  # aligned to a page, as direct access needs it
                    buffer[:] = b"\1" * size
                    # Blocks are allocated by the first write, which is not the medium's speed.
                    _moved(os.pwritev, handle, buffer)
                    for source, target, move in (
                        ("host", "flash", os.pwritev),
                        ("flash", "host", os.preadv),
                    ):
                        taken = sorted(_moved(move, handle, buffer) for _ in range(5 if size <= 2**24 else 3))
                        spread = (taken[-1] - taken[0]) / taken[len(taken) // 2]
                        results.add(("copy", source, target, size), taken[len(taken) // 2], spread)
        finally:
            os.close(handle)


def _moved(move: object, handle: int, buffer: mmap.mmap) -> float:
    started = time.perf_counter()
    done = move(handle, [buffer], 0)  # type: ignore[operator]
    if not getattr(os, "O_DIRECT", 0):
        os.fsync(handle)
    assert done == len(buffer), "a whole buffer is moved at once"
    return time.perf_counter() - started
