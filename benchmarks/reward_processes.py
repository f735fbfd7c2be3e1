"""The cost of a sandboxed program and of a reward in the pool: python benchmarks/reward_processes.py

`bare` is the start of an interpreter (`python -I -S`), which the sandbox's fork server does once. Programs: `pass`, one
that raises, and one that imports json and prints. Blocks of `--runs` programs of each kind alternate. Milliseconds of
wall clock: least and median of all programs, with an interval of 95% for the median; of processor time (user and
system, of this process and all that it starts, without the start of the server): median over blocks, least and largest.
The load of the machine stands beside.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from commandline import run
from measure import load
from pages import Benchmark

from hyper_parallel.rl.rewards import sandbox
from hyper_parallel.rl.rewards.pool import RewardPool
from hyper_parallel.rl.rewards.sandbox_fork_server import fork_server, interpreter

BENCHMARK = Benchmark("reward_processes")
JSON = "import json\nprint(json.dumps([1]))"


def timed(runs: int, blocks: int, kinds: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Wall and processor time of each kind, and what a server's start takes."""
    walls: dict[str, list[float]] = {name: [] for name in kinds}
    processor: dict[str, list[float]] = {name: [] for name in ("server starts", *kinds)}
    for _ in range(blocks):
        # Processor time of a server and its forks is known when the server has ended.
        fork_server().close()
        used = _processor()
        fork_server().close()
        server = _processor() - used
        processor["server starts"].append(server)
        for name, call in kinds.items():
            used = _processor()
            fork_server()
            for _ in range(runs):
                start = time.perf_counter()
                call()
                walls[name].append((time.perf_counter() - start) * 1e3)
            fork_server().close()
            processor[name].append((_processor() - used - server) / runs)
    return {
        name: {"processor": [round(one, 1) for one in (statistics.median(times), min(times), max(times))]}
        | ({"wall": _walls(walls[name])} if name in walls else {})
        for name, times in processor.items()
    }


def _walls(times: list[float]) -> dict[str, Any]:
    """Least, median, and the order statistics that hold the median with a probability of 95%."""
    ordered, count = sorted(times), len(times)
    half = round(0.98 * count**0.5)
    low, high = max(0, count // 2 - half), min(count - 1, count // 2 + half)
    return {
        "least": round(ordered[0], 1),
        "median": round(statistics.median(ordered), 1),
        "interval": [round(ordered[low], 1), round(ordered[high], 1)],
    }


def _processor() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) * 1e3


def main(runs: int = 20, blocks: int = 7) -> None:
    bare = [interpreter(), "-I", "-S", "-c", "pass"]
    found: dict[str, Any] = {"missing": list(sandbox.run("pass").missing), "load before": load()}
    kinds: dict[str, Callable[[], Any]] = {
        "bare": lambda: subprocess.run(bare, check=True, capture_output=True),
        "limits only": lambda: sandbox.run("pass", isolation="none"),
        "sandbox": lambda: sandbox.run("pass"),
        "sandbox, raises": lambda: sandbox.run("raise ValueError(3)"),
        "sandbox, json": lambda: sandbox.run(JSON),
    }
    found |= timed(runs, blocks, kinds)
    found["load after"] = load()
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
    BENCHMARK.keep(found)


if __name__ == "__main__":
    run(main)
