"""Seconds of `simulate` for each example, and of plans with a simulated step: python benchmarks/simulate_examples.py

Each command runs in a process of its own, as a user gives it: once with an empty cache of captured steps (cold), and
once more (again). Seconds are of the wall and of the process's processors, its children included; imports are part.
A command that takes longer than `--limit` seconds is stopped, and its row says so. `--only` names rows to measure.
"""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from campaigns import Rows
from commandline import run
from measure import ROOT
from pages import Benchmark, table
from processes import hyper_parallel, scratch

EXAMPLES = {
    "examples/quickstart.yaml": "h100x4",
    "examples/pipeline.yaml": "h100x4",
    "examples/simulate/llama-8b-pipeline.yaml": "h100x64",
    "examples/simulate/llama-8b.yaml": "h100x64",
    "examples/simulate/mixtral-8x7b.yaml": "h100x64",
    "examples/simulate/llama-70b.yaml": "h100x256",
    "examples/llama-405b.yaml": "h100x2048",
    "examples/deepseek-v3.yaml": "cloudmatrix384x2048",
}
"""File to the cluster that it is simulated on."""
_PLAN = ("--sequence", "4096", "--simulate", "1")
PLANS = {
    "DeepSeek-V3 on 512 H100": ("--model", "deepseek-v3", "--cluster", "h100x512", "--batch", "2048", *_PLAN),
    "Kimi-K2 on 384 910C": ("--model", "kimi-k2", "--cluster", "910cx768", "--batch", "3072", *_PLAN),
}
"""A 910C has two dies, each of which is a device."""


COMMANDS = {
    **{file: ("simulate", str(ROOT / file), "--cluster", cluster) for file, cluster in EXAMPLES.items()},
    **{name: ("plan", *given, "--out", "planned.yaml") for name, given in PLANS.items()},
}
"""Row to the arguments of `hyper-parallel`."""


def measured(arguments: Sequence[str], folder: Path, limit: float) -> dict[str, Any]:
    """One run of a command in a folder. Seconds are None where it was stopped at the limit."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    threads = {"OMP_NUM_THREADS": "1"}
    try:
        wall, printed = hyper_parallel(*arguments, "--json", folder=folder, environment=threads, limit=limit)
    except subprocess.TimeoutExpired:
        return {"wall": None, "cpu": None}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(wall, 1), "cpu": round(cpu, 1), "step": _step(json.loads(printed))}


def _step(found: dict[str, Any]) -> float | None:
    """The simulated seconds of a step, of `simulate` or of the first strategy that a plan simulated."""
    if "step" in found:
        return float(found["step"])
    steps = [one["step_time_s"] for one in found["predicted"] if one["step_time_s"] is not None]
    return float(steps[0]) if steps else None


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/simulate.md."""

    def cells(name: str, row: Mapping[str, Any]) -> Iterator[str]:
        yield name
        for state in ("cold", "cached"):
            for key in ("wall", "cpu"):
                if state not in row:
                    yield "–"
                else:
                    yield f"over {row['limit']:.0f}" if row[state][key] is None else f"{row[state][key]:.1f}"

    rows = result["rows"]
    yield from table(
        "Command | Cold: wall, s | CPU, s | Again: wall, s | CPU, s",
        (list(cells(name, rows[name])) for name in COMMANDS if name in rows),
    )


BENCHMARK = Benchmark("simulate_examples", {"simulate.md": page}, key="rows")


def main(only: Annotated[tuple[str, ...], tuple(COMMANDS)] = tuple(COMMANDS), limit: float = 600.0) -> None:
    """Measure the rows one after the other, and write each as it is measured."""
    rows = Rows(BENCHMARK)
    for name in only:
        with scratch() as folder:
            row = {"cold": measured(COMMANDS[name], folder, limit), "limit": limit}
            if name in EXAMPLES:  # captured steps are read when it runs again
                row["cached"] = measured(COMMANDS[name], folder, limit)
        print(name, row, flush=True)
        rows.add(name, row)


if __name__ == "__main__":
    run(main)
