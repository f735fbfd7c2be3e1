"""Benchmarks of one worker, whose parts all workers start together: memory, tiers, turns, collectives and their fit."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hyper_parallel.calibrate.operators import measure_attention, measure_operators, measure_products
from hyper_parallel.calibrate.timing import Job, Results, Timer, filled, in_turns
from hyper_parallel.cluster.collective_cost import form
from hyper_parallel.compat import Backend, collectives
from hyper_parallel.compat.kernels import adamw_


def measure(job: Job, backend: Backend, device: torch.device, progress: Callable[[str], None]) -> Results:
    """Run all parts of the job."""
    results, level = Results(), job.level
    timer = Timer(backend, *((0.03, 5, 15) if level == "full" else (0.015, 4, 9)))

    def memory() -> None:
        measure_bandwidth(timer, device, level, results)
        measure_optimizer(timer, device, level, results)

    def tiers() -> None:
        measure_copies(timer, device, level, results)
        measure_flash(Path(job.folder), level, results)

    def clock(call: Callable[[], object], size: int) -> list[float]:
        return _clock(backend, call, level, size)

    parts: dict[str, Callable[[], None]] = {
        "fresh": lambda: measure_fresh(device, level, results),
        "memory": memory,
        "matmul": lambda: measure_products(timer, device, level, results),
        "attention": lambda: measure_attention(timer, device, level, results),
        "operators": lambda: measure_operators(timer, device, level, results),
        "tiers": tiers,
        "turns": lambda: measure_turns(timer, device, level, results),
        "collectives": lambda: measure_collectives(backend, device, level, clock, results),
    }
    for part in job.parts:
        if job.world > 1:
            dist.barrier()
        progress(part)
        parts[part]()
        if part == "fresh":
            keep_freed_memory()
    return results


def measure_turns(timer: Timer, device: torch.device, level: str, results: Results) -> None:
    """Mean seconds by ("turns", operator) of a few operators, over windows much longer than a scheduler time slice.

    Workers that outnumber the cores share them in time slices. Compared with one worker per core, this measures how
    much slower each becomes.
    """
    window = {"full": 0.4, "shared": 0.4, "quick": 0.15, "tiny": 0.02}[level]
    square = filled((256, 256), torch.float32, device)
    small, large = (filled((n,), torch.float32, device) for n in (2**14, 2**22))
    for what, call in (
        ("matmul", lambda: square @ square),
        ("small elementwise", lambda: small + small),
        ("large elementwise", lambda: large + large),
        ("exp", lambda: large.exp()),
    ):
        if dist.is_initialized():
            dist.barrier()
        results.add(("turns", what), timer.mean(call, window), 0.0)


def _clock(backend: Backend, call: Callable[[], object], level: str, size: int) -> list[float]:
    """Seconds of repetitions of a collective of the given bytes, begun together, equally often on every rank."""
    taken = []
    # Small ones wait for the scheduler's turns more than for bytes, and vary the most.
    repetitions = 5 if level == "tiny" else 21 if size < 2**20 else 9
    for repetition in range(repetitions + 2):
        dist.barrier()
        backend.synchronize()
        started = time.perf_counter()
        call()
        backend.synchronize()
        if repetition >= 2:
            taken.append(time.perf_counter() - started)
    return taken


_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1  # mallopt(3)


_BUFFERS = {
    "full": (2**16, 2**20, 2**22, 2**24, 2**25, 2**26),
    "shared": (2**16, 2**20, 2**24, 2**25, 2**26),
    "quick": (2**20, 2**24),
    "tiny": (2**16, 2**20),
}
"""Level to the sizes of buffers in bytes."""


def measure_fresh(device: torch.device, level: str, results: Results) -> None:
    """Extra seconds by ("fresh", bytes) of the first write into a newly allocated buffer, compared with the second.

    The buffer replaces one that was just freed, as in a warm step: pages that the allocator kept are mapped, and
    pages that it gave back to the system must be mapped again. Call it before `keep_freed_memory`.
    """
    # A block as large as a model's, freed, sets the allocator's thresholds to what they are in training.
    block = filled(((2**25 if level != "tiny" else 2**20) // 4,), torch.float32, device)
    del block
    for size in _BUFFERS[level]:
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
    for size in _BUFFERS[level]:
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
    for size in _BUFFERS[level]:
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
            for size in _BUFFERS[level]:
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


# Collectives of real workers by kind, ranks and size, and the α and β that fit them.
#
# The closed forms of `cluster.collective_cost` are linear in α and 1/β,
#
#     t(B) = a · α + b(B) / β,        a = form(n, 0, 1, 1),   b(B) = form(n, B, 0, 1)
#
# so that the least squares of relative errors, Σ ((a α + b/β) / t − 1)², have a solution in closed form (`fit`), with
# α ≥ 0 and β > 0.
#
# A step gathers a layer's weights, and reduce-scatters their gradients, in one call. So do these measurements, with the
# tensors of a decoder layer (`LAYER`); the times include what a runtime does with several tensors, such as packing
# small ones.

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

LAYER = (4, 4, 4, 2, 2, 1, 1)
"""A layer's weights as shares of their sum: a gated MLP, query and output projections, keys and values."""


_MESSAGES = {
    "full": (2**10, 2**14, 2**17, 2**20, 2**22, 2**24),
    "shared": (2**10, 2**14, 2**17, 2**20, 2**22, 2**24),
    "quick": (2**12, 2**16, 2**18, 2**20, 2**22, 2**24),
    "tiny": (2**12, 2**16),
}
"""Level to the bytes that a rank sends, for a gather those that it receives; multiples of four bytes for each of 64
ranks."""


def group_sizes(world: int) -> list[int]:
    """Ranks of the groups to measure: all, and halves down to pairs where they are even; equal groups run at once."""
    found = [world]
    while found[-1] % 2 == 0 and found[-1] > 2:
        found.append(found[-1] // 2)
    return found


def measure_collectives(
    backend: Backend,
    device: torch.device,
    level: str,
    clock: Callable[[Callable[[], object], int], list[float]],
    results: Results,
) -> None:
    """Seconds by ("collective", kind, ranks, bytes that a rank gives). Every rank of the default group calls it."""
    world = dist.get_world_size()
    for ranks in group_sizes(world):
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group = groups[dist.get_rank() // ranks]
        calls = _calls(group, ranks)
        for kind in KINDS:
            for size in _MESSAGES[level]:
                given = size // ranks if kind == "all_gather" else size
                x = torch.ones(given // 4, device=device)
                taken = sorted(clock(partial(calls[kind], x), size))
                # What the slowest rank took is what the group took.
                quarter, median, last = (taken[len(taken) * part // 4] for part in (1, 2, 3))
                longest = torch.tensor([quarter, (last - quarter) / median], device=device)
                dist.all_reduce(longest, op=dist.ReduceOp.MAX)
                results.add(("collective", kind, ranks, given), longest[0].item(), longest[1].item())
        dist.barrier()


def _calls(group: dist.ProcessGroup, ranks: int) -> dict[str, Callable[[torch.Tensor], object]]:
    """The calls that a step's graph makes, by kind."""
    name = group.group_name

    def even(x: torch.Tensor, multiple: int) -> torch.Tensor:
        return x[: x.numel() // multiple * multiple]

    def layer(x: torch.Tensor, multiple: int) -> list[torch.Tensor]:
        unit = x.numel() // (sum(LAYER) * multiple) * multiple
        if not unit:
            return [even(x, multiple)]
        return list(x[: sum(LAYER) * unit].split([part * unit for part in LAYER]))

    def to_all(x: torch.Tensor) -> torch.Tensor:
        parts = [x.numel() // ranks] * ranks
        return collectives.all_to_all(even(x, ranks), parts, parts, name)

    return {
        "all_reduce": lambda x: collectives.all_reduce(x, name),
        "all_gather": lambda x: collectives.all_gather_coalesced(layer(x, 1), name, ranks),
        "reduce_scatter": lambda x: collectives.reduce_scatter_coalesced(layer(x, ranks), name, ranks),
        "all_to_all": to_all,
        "broadcast": lambda x: dist.broadcast(x, group_src=0, group=group),
    }


def fit(kind: str, ranks: int, points: Mapping[int, float]) -> tuple[float, float, float]:
    """α in seconds, β in B/s, and the mean of |fitted / measured − 1|; `points` are seconds by bytes."""
    closed = form(kind)
    rows = [
        (closed(ranks, 0, 1.0, 1.0) / seconds, closed(ranks, size, 0.0, 1.0) / seconds)
        for size, seconds in points.items()
    ]
    aa, ab, bb = (
        sum(x * y for x, y in pairs) for pairs in ([(a, a) for a, _ in rows], rows, [(b, b) for _, b in rows])
    )
    a, b = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency, inverse = 0.0, b / bb
    if determinant > 0:
        latency, inverse = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency <= 0:
        latency, inverse = 0.0, b / bb
    elif inverse <= 0:
        # Nothing but latency shows: the largest size bounds the bandwidth.
        latency, inverse = a / aa, min(seconds / closed(ranks, n, 0.0, 1.0) for n, seconds in points.items())
    residual = sum(abs(latency * a + inverse * b - 1) for a, b in rows) / len(rows)
    return latency, 1 / inverse, residual
