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
from functools import partial
from typing import Any

from commandline import run
from measure import in_turns, interval, load, taken_seconds
from pages import Benchmark

from hyper_parallel.rl.rewards import sandbox
from hyper_parallel.rl.rewards.pool import RewardPool
from hyper_parallel.rl.rewards.sandbox_fork_server import fork_server, interpreter

BENCHMARK = Benchmark("reward_processes")
SERVER = "server starts"
JSON = "import json\nprint(json.dumps([1]))"


def block(runs: int, call: Callable[[], Any]) -> tuple[float, list[float]]:
    """Milliseconds of processor time of a server and its forks, and of the clock of each run."""
    used = _processor()
    fork_server()
    walls = [taken_seconds(call) * 1e3 for _ in range(runs)]
    fork_server().close()  # whose processor time, and that of its forks, is known when it has ended
    return _processor() - used, walls


def timed(runs: int, blocks: int, kinds: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Wall and processor time of each kind, and what a server's start takes."""
    fork_server().close()
    turns = {name: partial(block, runs, call) for name, call in kinds.items()}
    found = in_turns({SERVER: partial(block, 0, list), **turns}, blocks, lambda turn: turn())
    starts = [used for used, _ in found[SERVER]]
    table: dict[str, dict[str, Any]] = {SERVER: {"processor": _spread(starts)}}
    for name in kinds:
        used = [(one - start) / runs for (one, _), start in zip(found[name], starts, strict=True)]
        walls = [wall for _, several in found[name] for wall in several]
        wall: dict[str, Any] = {"least": round(min(walls), 1), "median": round(statistics.median(walls), 1)}
        wall["interval"] = [round(one, 1) for one in interval(statistics.median, walls).values()]
        table[name] = {"processor": _spread(used), "wall": wall}
    return table


def _spread(times: list[float]) -> list[float]:
    return [round(one, 1) for one in (statistics.median(times), min(times), max(times))]


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
