"""What every benchmark shares: the machine's description, paired statistics, and the result file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import queue
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.compat import Backend

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Enough to know what a figure was measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": None
        if accelerator is None
        else torch.get_device_module(accelerator).get_device_name(0),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Without log messages up to warnings, of any package; what is measured says them again and again."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The median of the paired ratios ours / theirs, with a 95% bootstrap interval of that median."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {
        "ratio": statistics.median(ratios),
        "low": medians[int(0.025 * len(medians))],
        "high": medians[int(0.975 * len(medians))],
        "ours_s": statistics.median(ours),
        "theirs_s": statistics.median(theirs),
        "pairs": float(len(ratios)),
    }


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def answer_of(processes: Sequence[Any], answers: Any) -> Any:
    """What one of the processes, which have been started, puts into the queue, when all have ended. Raises
    AssertionError where one fails before."""
    while True:
        try:
            answer = answers.get(timeout=5)
            break
        except queue.Empty:
            assert all(process.exitcode in (None, 0) for process in processes), "a worker failed"
    for process in processes:
        process.join()
    return answer


def timed(step: Callable[[], object], world: int) -> float:
    """Seconds of one step, of the slowest rank."""
    if world > 1:
        dist.barrier()
    start = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - start)
    if world > 1:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def timed_on(backend: Backend, step: Callable[[], object]) -> float:
    """Seconds of one step on a device, until it has done all of it."""
    backend.synchronize()
    start = time.perf_counter()
    step()
    backend.synchronize()
    return time.perf_counter() - start


def write(name: str, result: dict[str, Any]) -> Path:
    """Keep a result under ``benchmarks/results`` with the machine described."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    stamped = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), **result}
    path.write_text(json.dumps(stamped, indent=1) + "\n")
    return path
