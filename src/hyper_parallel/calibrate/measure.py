"""Benchmark jobs of one worker; all workers start each part together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hyper_parallel.calibrate import memory
from hyper_parallel.calibrate.collectives import measure_collectives
from hyper_parallel.calibrate.operators import measure_operators
from hyper_parallel.calibrate.products import measure_attention, measure_products
from hyper_parallel.calibrate.results import Results
from hyper_parallel.calibrate.timing import Timer, filled
from hyper_parallel.calibrate.workers import Job
from hyper_parallel.compat import Backend

PARTS = ("fresh", "memory", "matmul", "attention", "operators", "tiers", "turns", "collectives")


def measure(job: Job, backend: Backend, device: torch.device, progress: Callable[[str], None]) -> Results:
    """Run all parts of the job."""
    results = Results()
    timer = Timer(backend, *((0.03, 5, 15) if job.level == "full" else (0.015, 4, 9)))
    parts: dict[str, Callable[[], None]] = {
        "fresh": lambda: memory.measure_fresh(device, job.level, results),
        "memory": lambda: _memory(timer, device, job.level, results),
        "matmul": lambda: measure_products(timer, device, job.level, results),
        "attention": lambda: measure_attention(timer, device, job.level, results),
        "operators": lambda: measure_operators(timer, device, job.level, results),
        "tiers": lambda: _tiers(timer, device, job, results),
        "turns": lambda: measure_turns(timer, device, job.level, results),
        "collectives": lambda: measure_collectives(
            backend, device, job.level, lambda call, size: _clock(backend, call, job.level, size), results
        ),
    }
    for part in job.parts:
        if job.world > 1:
            dist.barrier()
        progress(part)
        parts[part]()
        if part == "fresh":
            memory.keep_freed_memory()
    return results


def _memory(timer: Timer, device: torch.device, level: str, results: Results) -> None:
    memory.measure_bandwidth(timer, device, level, results)
    memory.measure_optimizer(timer, device, level, results)


def _tiers(timer: Timer, device: torch.device, job: Job, results: Results) -> None:
    memory.measure_copies(timer, device, job.level, results)
    memory.measure_flash(Path(job.folder), job.level, results)


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
