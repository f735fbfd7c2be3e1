"""One prediction: python benchmarks/one_prediction.py

Asks `hyper-parallel plan` 40 questions (5 models on 8 clusters), and `simulate` and `inspect` about each file that it
writes. For each: seconds and bytes, what the closed forms of the search said, and processor seconds of the commands.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from campaigns import Rows
from commandline import Again, run
from pages import Benchmark, table

MODELS = ("llama-3-8b", "qwen-3-14b", "llama-3-70b", "qwen-3-30b-a3b", "mixtral-8x7b")
CLUSTERS = ("a100x16", "a100x64", "h100x16", "h100x64", "b200x64", "gb200-nvl72x72", "910bx64", "mi300xx64")
SEQUENCES = 4
"""Of a step, for each device."""
LIMIT = 1800
"""Seconds of a command."""
Row = Mapping[str, Any]


def command(*arguments: str) -> tuple[dict[str, Any], float]:
    """What a command prints as JSON, and its processor seconds; its error where it fails."""
    began = _processor_seconds()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hyper_parallel", *arguments, "--json"],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not answered after {LIMIT} s"}, float(LIMIT)
    seconds = _processor_seconds() - began
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}, seconds
    found: dict[str, Any] = json.loads(done.stdout)
    return found, seconds


def _processor_seconds() -> float:
    """Of all commands so far."""
    used = os.times()
    return used.children_user + used.children_system


def asked(model: str, cluster: str, folder: Path) -> Row:
    """One question."""
    batch = SEQUENCES * int(cluster.rpartition("x")[2])
    file = folder / "run.yaml"
    plan, seconds = command(
        *("plan", "--model", model, "--cluster", cluster, "--batch", str(batch), "--out", str(file))
    )
    if "error" in plan:
        return {"planned_in_s": seconds, "error": plan["error"]}
    answer, best = plan["answer"], plan["best"][plan["chosen"]]
    row = {
        "axes": {k: v for k, v in answer["strategy"].items() if k in AXES and v != 1},
        "estimated": plan["estimated"],
        "step_s": answer["step_time_s"],
        "peak_bytes": answer["peak_bytes"],
        "closed_forms_s": best["step_time_s"],
        "mfu": answer["mfu"],
        "planned_in_s": seconds,
    }
    simulated, seconds = command("simulate", str(file), "--cluster", cluster, "train.graph_cache=false")
    if "error" in simulated:
        return {**row, "simulated_in_s": seconds, "error": simulated["error"]}
    inspected, _ = command("inspect", str(file), "--cluster", cluster)
    return {
        **row,
        "simulated_s": simulated["step"],
        "simulated_bytes": simulated["memory"]["peak"],
        "inspected_bytes": inspected.get("peak"),
        "simulated_in_s": seconds,
    }


AXES = ("replicate", "shard", "context", "tensor_x", "tensor_y", "pipeline", "expert")


def apart(row: Row, plan: str, simulated: str) -> float:
    """By how much a figure of the plan is off, as a share."""
    return abs(row[plan] / row[simulated] - 1)


def summary(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Median and worst difference of all questions that both commands answered."""
    both = [row for row in rows.values() if "simulated_s" in row]
    if not both:
        return {}
    found: dict[str, Any] = {"questions": len(rows), "answered": len(both)}
    for name, plan, simulated in (
        ("step", "step_s", "simulated_s"),
        ("memory", "peak_bytes", "simulated_bytes"),
        ("inspected", "inspected_bytes", "simulated_bytes"),
        ("closed_forms", "closed_forms_s", "simulated_s"),
    ):
        shares = [apart(row, plan, simulated) for row in both if row.get(plan) is not None]
        if not shares:
            continue
        found[name] = {"median": statistics.median(shares), "worst": max(shares)}
    found["planned_in_s"] = statistics.median(row["planned_in_s"] for row in both)
    return found


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/plan.md."""
    told = {name: result[name] for name in ("step", "memory", "inspected", "closed_forms") if name in result}
    yield (
        f"`plan` beside `simulate` of the file that it writes, {result.get('answered', 0)} questions of "
        f"{result.get('questions', 0)} (`benchmarks/one_prediction.py`):"
    )
    yield ""
    yield from table(
        "Beside `simulate` | median difference | worst",
        ((MEANT[name], f"{one['median']:.1%}", f"{one['worst']:.1%}") for name, one in told.items()),
        "lrr",
    )
    yield ""
    rows = [
        (
            name,
            " · ".join(f"{axis} {degree}" for axis, degree in row.get("axes", {}).items()),
            f"{row['step_s']:.2f}" if "step_s" in row else row["error"],
            f"{row['simulated_s']:.2f}" if "simulated_s" in row else "",
            f"{row['closed_forms_s']:.2f}" if "closed_forms_s" in row else "",
            f"{row['planned_in_s']:.0f}",
        )
        for name, row in result["cases"].items()
    ]
    yield from table(
        "Question | axes | plan, s | simulate, s | closed forms, s | planned in, processor s", rows, "llrrrr"
    )


MEANT = {
    "step": "step of `plan`",
    "memory": "memory of `plan`",
    "inspected": "memory of `inspect`",
    "closed_forms": "step of the closed forms",
}
BENCHMARK = Benchmark("one_prediction", pages={"plan.md": page})


def main(
    only: Annotated[str, "questions whose name contains this"] = "",
    again: Again = False,
) -> None:
    """Ask what has not been asked yet."""
    result = Rows(BENCHMARK, summary=summary)
    names = [f"{model} on {cluster}" for model in MODELS for cluster in CLUSTERS]
    for name in result.missing(names, only, again):
        model, _, cluster = name.partition(" on ")
        with tempfile.TemporaryDirectory() as folder:
            result.add(name, asked(model, cluster, Path(folder)))
        print(name, result.rows[name], flush=True)


if __name__ == "__main__":
    run(main)
