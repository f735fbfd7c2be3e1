"""Seconds of `simulate` for each example, and of plans with a simulated step: python benchmarks/simulate_examples.py

Each command runs in a process of its own, as a user gives it: once with an empty cache of captured steps (cold), and
once more (again). Seconds are of the wall and of the process's processors, its children included; imports are part.
A command that takes longer than `--limit` seconds is stopped, and its row says so. `--only` names rows to measure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import RESULTS, write

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "simulate.md"
BEGIN, END = (
    "<!-- benchmarks/simulate_examples.py: begin -->",
    "<!-- benchmarks/simulate_examples.py: end -->",
)

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
_PLAN = ("--sequence", "4096", "--runnable", "--refine", "1")
PLANS = {
    "DeepSeek-V3 on 512 H100": ("--model", "deepseek-v3", "--cluster", "h100x512", "--batch", "2048", *_PLAN),
    "Kimi-K2 on 384 910C": ("--model", "kimi-k2", "--cluster", "910cx768", "--batch", "3072", *_PLAN),
}
"""A 910C has two dies, each of which is a device."""


def commands() -> dict[str, tuple[list[str], bool]]:
    """Row to the arguments of `hyper-parallel`, and whether it reads captured steps when it runs again."""
    found: dict[str, tuple[list[str], bool]] = {}
    for file, cluster in EXAMPLES.items():
        found[file] = (["simulate", str(ROOT / file), "--cluster", cluster, "--json"], True)
    for name, given in PLANS.items():
        found[name] = (["plan", *given, "--out", "planned.yaml", "--json"], False)
    return found


def measured(arguments: list[str], folder: Path, limit: float) -> dict[str, Any]:
    """One run of a command in a folder. Seconds are None where it was stopped at the limit."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    code = "from hyper_parallel.cli.main import main; main()"
    output = folder / "output"
    with output.open("w") as stdout, (folder / "errors").open("w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=folder,
            env=environ,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = None
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if status is None:
        return {"wall": None, "cpu": None}
    if status:
        raise SystemExit(f"{arguments}: exit code {status}: {(folder / 'errors').read_text()[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(wall, 1), "cpu": round(cpu, 1), "step": _step(json.loads(output.read_text()))}


def _step(found: dict[str, Any]) -> float | None:
    """The simulated seconds of a step, of `simulate` or of the first strategy that a plan simulated."""
    if "step" in found:
        return float(found["step"])
    steps = [one["step_time_s"] for one in found["predicted"] if one["step_time_s"] is not None]
    return float(steps[0]) if steps else None


def main() -> None:
    """Measure the rows one after the other, and write each as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(commands()), default=list(commands()))
    parser.add_argument("--limit", type=float, default=600.0)
    asked = parser.parse_args()
    path = RESULTS / "simulate_examples.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for name in asked.only:
        arguments, keeps = commands()[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            rows[name] = {"cold": measured(arguments, folder, asked.limit), "limit": asked.limit}
            if keeps:
                rows[name]["cached"] = measured(arguments, folder, asked.limit)
        print(name, rows[name], flush=True)
        write("simulate_examples", {"rows": rows})
        PAGE.write_text(with_table(PAGE.read_text(), rows))


def with_table(text: str, rows: dict[str, dict[str, Any]]) -> str:
    """The page with the rows' table between its two marks."""
    lines = [
        "| Command | Cold: wall, s | CPU, s | Again: wall, s | CPU, s |",
        "|---|---|---|---|---|",
    ]
    for name in commands():
        if name in rows:
            row = rows[name]
            cells = [
                _cell(row.get(state), key, row["limit"])
                for state in ("cold", "cached")
                for key in ("wall", "cpu")
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    before, _, rest = text.partition(BEGIN)
    _, found, behind = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table, which is between {BEGIN} and {END}")
    return "\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{behind}"])


def _cell(row: dict[str, Any] | None, key: str, limit: float) -> str:
    if row is None:
        return "–"
    return f"over {limit:.0f}" if row[key] is None else f"{row[key]:.1f}"


if __name__ == "__main__":
    main()
