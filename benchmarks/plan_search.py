"""How long the planner's search takes, how much memory, and which bound excludes how many strategies.

    python benchmarks/plan_search.py           # writes benchmarks/results/plan_search.json and docs/plan-search.md

Each search is a process of its own on one core, whose peak of resident memory is read when it ends; imports are not in
the time. The constants are the fitted ones.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from typing import Any

from commandline import run
from pages import Benchmark, spaced, table
from processes import fresh

CASES = [
    {"model": model, "cluster": "h100", "batch": batch, "sequence": sequence, "devices": devices}
    for model, batch, sequence in (("llama-3-405b", 2048, 8192), ("deepseek-v3", 8192, 4096))
    for devices in (2048, 16384)
]
"""`batch`: sequences of a step."""
RUNS = 3


def searched(case: Mapping[str, Any]) -> dict[str, Any]:
    """One search in this process."""
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.planner.constants import fitted
    from hyper_parallel.planner.query import Question
    from hyper_parallel.planner.search import search
    from hyper_parallel.workload.published import shape
    from hyper_parallel.workload.workload import Workload

    work = Workload(shape(case["model"]), batch=case["batch"], sequence=case["sequence"])
    asked = Question(workload=work, cluster=Cluster.named(case["cluster"]), devices=case["devices"])
    constants = fitted()
    began, cpu = time.perf_counter(), time.process_time()
    found = search(asked, constants)
    return {
        **case,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "points": found.counted,
        "pruned": found.pruned,
        "estimated": found.weighed,
        "gap": found.gap,
    }


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/plan-search.md."""
    return spaced(
        f"Measured {result['date']} on one core ({result['machine']['cpu']}), the quickest of {result['runs']} runs.",
        table(
            "Model | Devices | Strategies | Excluded by memory | by time | by `kept` | Estimated | CPU s | GiB | Gap",
            (
                f"| {row['model']} | {row['devices']:,} | {row['points']:,} | {row['pruned']['memory']:,} | "
                f"{row['pruned']['time']:,} | {row['pruned']['kept']:,} | {row['estimated']:,} | "
                f"{row['cpu_seconds']:.2f} | {row['peak_gib']:.2f} | {row['gap']:.0%} |"
                for row in result["rows"]
            ),
        ),
    )


BENCHMARK = Benchmark("plan_search", {"plan-search.md": lines})


def main() -> None:
    """Every case, the quickest of its runs."""
    rows = []
    for case in CASES:
        # A process begins with the peak of the one that started it: this one imports nothing large before.
        runs = [fresh(searched, case) for _ in range(RUNS)]
        rows.append(min(runs, key=lambda run: run["cpu_seconds"]))
        print(rows[-1], flush=True)
    BENCHMARK.keep({"runs": RUNS, "rows": rows})


if __name__ == "__main__":
    run(main)
