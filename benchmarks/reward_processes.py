"""The cost of a sandboxed program and of a reward in the pool: python benchmarks/reward_processes.py

A program costs the start of an interpreter (`bare`: `python -I -S`), and what isolation adds. Each kind is run
`--runs` times, alternating. Times are milliseconds of wall clock, with a high median on a busy machine,
and of processor time (user and system, parent and children). Writes ``benchmarks/results/reward_processes.json``.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from measure import write

from hyper_parallel.rl.rewards import sandbox
from hyper_parallel.rl.rewards.pool import RewardPool


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=60)
    runs = parser.parse_args().runs
    bare = [sandbox._interpreter(), "-I", "-S", "-c", "pass"]
    found: dict[str, Any] = {"missing": list(sandbox.run("pass").missing)}
    found |= timed(
        runs,
        {
            "bare": lambda: subprocess.run(bare, check=True, capture_output=True),
            "limits only": lambda: sandbox.run("pass", isolation="none"),
            "sandbox": lambda: sandbox.run("pass"),
        },
    )
    start = time.perf_counter()
    with RewardPool("exact_match", workers=1) as pool:
        found["pool with one worker starts, ms"] = round((time.perf_counter() - start) * 1e3, 1)
        rows = [(number, "53142=", "12345", {"answer": "12345"}) for number in range(2000)]
        start = time.perf_counter()
        pool.submit_many(rows)
        while pool.waiting:
            pool.results(1.0)
        found["exact_match in the pool, µs each"] = round((time.perf_counter() - start) / len(rows) * 1e6, 1)
    for name, value in found.items():
        print(f"{name}: {value}")
    write("reward_processes", found)


def timed(runs: int, kinds: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Least and median wall time, and mean processor time, of each kind."""
    walls: dict[str, list[float]] = {name: [] for name in kinds}
    processor = dict.fromkeys(kinds, 0.0)
    for _ in range(runs):
        for name, call in kinds.items():
            used, start = _processor(), time.perf_counter()
            call()
            walls[name].append((time.perf_counter() - start) * 1e3)
            processor[name] += (_processor() - used) * 1e3
    return {
        name: {
            "least": round(min(times), 1),
            "median": round(statistics.median(times), 1),
            "processor": round(processor[name] / runs, 1),
        }
        for name, times in walls.items()
    }


def _processor() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
