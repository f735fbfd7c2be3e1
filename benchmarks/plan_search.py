"""How long the planner's search takes, how much memory, and which bound excludes how many strategies.

    python benchmarks/plan_search.py           # writes benchmarks/results/plan_search.json and docs/plan-search.md

Each search is a process of its own on one core, whose peak of resident memory is read when it ends; imports are not in
the time. The constants are the fitted ones.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

CASES = [("llama-3-405b", "h100", 2048, 8192, devices) for devices in (2048, 16384)] + [
    ("deepseek-v3", "h100", 8192, 4096, devices) for devices in (2048, 16384)
]
"""Model, cluster, sequences of a step, tokens of a sequence, devices."""
RUNS = 3


def one(model: str, cluster: str, batch: int, sequence: int, devices: int) -> dict[str, Any]:
    """One search in this process."""
    from hyper_parallel.cluster import Cluster
    from hyper_parallel.planner.constants import fitted
    from hyper_parallel.planner.query import Question
    from hyper_parallel.planner.search import answer
    from hyper_parallel.workload.published import shape
    from hyper_parallel.workload.workload import Workload

    work = Workload(shape(model), batch=batch, sequence=sequence)
    asked = Question(workload=work, cluster=Cluster.named(cluster), devices=devices)
    constants = fitted()
    began, cpu = time.perf_counter(), time.process_time()
    found = answer(asked, constants)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "points": found.counted,
        "pruned": found.pruned,
        "estimated": found.weighed,
        "gap": found.gap,
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table of docs/plan-search.md."""
    found = [
        f"Measured {result['date']} on one core ({result['machine']['cpu']}), the quickest of {result['runs']} runs.",
        "",
        "| Model | Devices | Strategies | Excluded by memory | by time | by `kept` | Estimated | CPU s | GiB | Gap |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        pruned = row["pruned"]
        found.append(
            f"| {row['model']} | {row['devices']:,} | {row['points']:,} | {pruned['memory']:,} | {pruned['time']:,} | "
            f"{pruned['kept']:,} | {row['estimated']:,} | {row['cpu_seconds']:.2f} | {row['peak_gib']:.2f} | "
            f"{row['gap']:.0%} |"
        )
    return found


def main() -> None:
    """Every case, the quickest of its runs."""
    if sys.argv[1:]:
        model, cluster, *sizes = sys.argv[1:]
        print(json.dumps(one(model, cluster, *map(int, sizes))))
        return
    rows = []
    for case in CASES:
        model, cluster, batch, sequence, devices = case
        command = [sys.executable, __file__, *map(str, case)]
        single = {**os.environ, "OMP_NUM_THREADS": "1"}
        runs = [json.loads(subprocess.check_output(command, env=single)) for _ in range(RUNS)]
        best = min(runs, key=lambda run: run["cpu_seconds"])
        about = {"model": model, "cluster": cluster, "batch": batch, "sequence": sequence, "devices": devices}
        rows.append({**about, **best})
        print(rows[-1])
    # After the runs: a process begins with the peak of the one that started it, and this imports torch.
    import measure
    import pages

    path = measure.write("plan_search", {"runs": RUNS, "rows": rows})
    pages.put(pages.DOCS / "plan-search.md", "plan_search.py", lines(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
