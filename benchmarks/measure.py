"""Measurement of a benchmark: alternatives in turns, medians with bootstrap intervals, the machine, and the result.

A script measures in this order: `in_turns` runs its alternatives round after round in one process, so that what else
the machine does meets all of them; `paired_ratio` compares them round by round; `write` keeps the figures with the
machine that they belong to. PyTorch is imported where it is used: the peak memory of a fresh process contains that of
the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from hyper_parallel.compat import Backend

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_folder = RESULTS
T = TypeVar("T")

# Scripts share models, workers and judges with the tests (`harness`), and the fit of constants with `tools`.
sys.path += [folder for folder in (str(ROOT / "tests"), str(ROOT / "tools")) if folder not in sys.path]


# Seconds.


class Taken(NamedTuple):
    """One run of an alternative."""

    clock: float
    processor: float
    """Seconds of this process's processors, which say more where others use the machine."""
    result: Any


def taken(run: Callable[[], Any]) -> Taken:
    """Run once, with garbage collected before."""
    gc.collect()
    clock, processor = time.perf_counter(), time.process_time()
    result = run()
    return Taken(time.perf_counter() - clock, time.process_time() - processor, result)


def timed(step: Callable[[], object], world: int = 1) -> float:
    """Seconds of one step, of the slowest rank."""
    if world == 1:
        return taken_seconds(step)
    import torch
    import torch.distributed as dist

    dist.barrier()
    seconds = torch.tensor(taken_seconds(step))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def taken_seconds(step: Callable[[], object]) -> float:
    """Seconds of the clock."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def timed_on(backend: Backend, step: Callable[[], object]) -> float:
    """Seconds of one step on a device, until it has done all of it."""
    backend.synchronize()
    start = time.perf_counter()
    step()
    backend.synchronize()
    return time.perf_counter() - start


def in_turns(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    measure: Callable[[Callable[[], Any]], T],
    warm: int = 0,
) -> dict[str, list[T]]:
    """Measure each alternative once a round; the results by name, those of the first `warm` rounds left out.

    The order rotates: whichever goes first meets other caches.
    """
    names = list(runs)
    found: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(warm + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            value = measure(runs[name])
            if turn >= warm:
                found[name].append(value)
    return found


# Statistics.


def interval(
    statistic: Callable[[Sequence[Any]], float], sample: Sequence[Any], seed: int = 0
) -> dict[str, float]:
    """The 95% bootstrap interval of a statistic: `low` and `high`."""
    draw = random.Random(seed)
    found = sorted(statistic(draw.choices(sample, k=len(sample))) for _ in range(4000))
    return {"low": found[int(0.025 * len(found))], "high": found[int(0.975 * len(found))]}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The median of the paired ratios ours / theirs, with a 95% bootstrap interval of that median."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        **interval(statistics.median, ratios, seed),
        "ours_s": statistics.median(ours),
        "theirs_s": statistics.median(theirs),
        "pairs": float(len(ratios)),
    }


def ratio_text(ratio: Mapping[str, float], digits: int = 2) -> str:
    """A ratio and its interval, as tables show them: ``1.52x (1.41 to 1.54)``."""
    value, low, high = (f"{ratio[key]:.{digits}f}" for key in ("ratio", "low", "high"))
    return f"{value}x ({low} to {high})"


def quartile_ratio(values: Sequence[float]) -> float:
    """The third quartile over the first: how quiet the machine was."""
    quartiles = statistics.quantiles(values, n=4)
    return quartiles[2] / quartiles[0]


# The process and the machine.


def quiet(threads: int | None = None) -> None:
    """Silence warnings, log messages up to warnings, and progress bars for the rest of this process, and compute with
    so many threads."""
    import torch
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Log nothing up to warnings, of any package; what is measured would repeat it in each round."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def load() -> float:
    """The machine's load of the last minute."""
    return os.getloadavg()[0]


def machine() -> dict[str, Any]:
    """Enough to know what a figure was measured on."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].split(":", 1)[1].strip() if lines else cpu
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    name = None if accelerator is None else torch.get_device_module(accelerator).get_device_name(0)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


# Results.


def write_into(folder: Path) -> None:
    """Write results of this process to another folder, and read earlier ones there (``--out``)."""
    global _folder
    _folder = folder


def is_elsewhere() -> bool:
    """Whether results go to a folder that was given: pages of docs/ then stay as they are."""
    return _folder != RESULTS


def path_of(name: str) -> Path:
    """The file of a result."""
    return _folder / f"{name}.json"


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Keep a result with the date and the machine; paths in messages become those of the repository."""
    path = path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), **result}
    path.write_text(json.dumps(stamped, indent=1).replace(f"{ROOT}/", "") + "\n")
    return path


def kept(name: str) -> dict[str, Any]:
    """An earlier result; empty where there is none."""
    path = path_of(name)
    return json.loads(path.read_text()) if path.exists() else {}
