"""What `strategy: auto` picks where memory is short, beside other strategies: python benchmarks/auto_budgets.py

Three machines. This one, with 2 and with 4 workers, a budget below what plain data parallelism needs and a host tier:
`train` picks a strategy, after trials within the budget; then each strategy is trained for `STEPS` steps in turns with
the others, `ROUNDS` times; its time is the least median, the first two steps apart. Two simulated clusters, with
models whose state is more than the devices hold: each strategy is captured and simulated as `simulate` would.

The others are the best estimates with the budget in the search, at most `ALIKE` with the same degrees, and plain fully
sharded data parallelism within the same budget.
"""

from __future__ import annotations

import argparse
import bisect
import cmd
import difflib
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import RESULTS, machine
from pages import DOCS, put

from hyper_parallel import config as files
from hyper_parallel import launch
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate import predict_run
from hyper_parallel.planner.auto.choose import choose
from hyper_parallel.planner.auto.entry import TARGET
from hyper_parallel.planner.auto.machine import measured
from hyper_parallel.planner.auto.query import precision_of, question_of
from hyper_parallel.planner.auto.resolved import Overrides, overrides_of, resolved
from hyper_parallel.planner.auto.saved_choice import STRATEGY_FILE, read
from hyper_parallel.planner.constants import fitted
from hyper_parallel.planner.enumerate import ranked
from hyper_parallel.planner.measured_constants import is_measured, read_off
from hyper_parallel.units import format_bytes, format_duration

NAME = "auto_budgets.json"
OTHERS, ALIKE = 4, 1
STEPS = 6
ROUNDS = 3
"""Times that each strategy is trained, in turns."""
HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 2048,
}
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    **HEADS,
}
WIDE = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
}
CASES: dict[str, dict[str, Any]] = {
    "this machine, 2 workers": {"workers": 2, "config": SMALL, "device": "48MiB", "host": "256MiB"},
    "this machine, 4 workers": {"workers": 4, "config": SMALL, "device": "32MiB", "host": "256MiB"},
    "h100x8": {"cluster": "h100x8", "workers": 8, "config": {**WIDE, "num_hidden_layers": 12}},
    "910cx8": {"cluster": "910cx8", "workers": 8, "config": {**WIDE, "num_hidden_layers": 9}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", help="only these, separated by semicolons")
    parser.add_argument("--page", action="store_true", help="write the page from the figures that are there")
    arguments = parser.parse_args()
    if not arguments.page:
        there = RESULTS / NAME
        cases = json.loads(there.read_text())["cases"] if there.exists() else {}
        for name in arguments.cases.split(";") if arguments.cases else CASES:
            with tempfile.TemporaryDirectory(prefix="auto-budgets-") as folder:
                cases[name] = _case(name, CASES[name], Path(folder))
            there.write_text(
                json.dumps({"machine": machine(), "steps": STEPS, "cases": cases}, indent=1) + "\n"
            )
    put(DOCS / "plan-memory.md", "auto_budgets.py", _lines(json.loads((RESULTS / NAME).read_text())))


def _case(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The pick and the others, each with its seconds of a step; None where it cannot run."""
    world, simulated = case["workers"], "cluster" in case
    cluster = Cluster.named(case["cluster"]) if simulated else measured(world, print)
    run = _run(case, folder)
    begun = time.monotonic()
    if simulated:
        picked = choose(run, cluster, world, print)
        laid, said = picked.laid, list(picked.lines)
    else:
        laid, said = _chosen(run)
    choosing = time.monotonic() - begun
    strategies = [laid, *_others(run, cluster, world, laid)]
    found: list[list[float | None]] = [[] for _ in strategies]
    reasons = [""] * len(strategies)
    for _ in range(1 if simulated else ROUNDS):
        for place, one in enumerate(strategies):
            if None in found[place]:
                continue
            took, reasons[place] = _predicted(run, one, cluster) if simulated else _trained(run, one, folder)
            found[place].append(took)
            print(f"  {name}: {took} {reasons[place]} {json.dumps(one['strategy'])}", flush=True)
    # Other load only adds to a step: the least of the rounds is nearest to the strategy's own time.
    rows = [
        {"laid": one, "seconds": None if None in seconds else min(s for s in seconds if s), "reason": reason}
        for one, seconds, reason in zip(strategies, found, reasons, strict=True)
    ]
    times = [row["seconds"] for row in rows if row["seconds"] is not None]
    memory = resolved(run, laid).strategy.memory
    return {
        "simulated": simulated,
        "device": memory.device,
        "host": memory.host,
        "choosing_s": choosing,
        "said": said,
        "rows": rows,
        "ratio": rows[0]["seconds"] / min(times) if rows[0]["seconds"] is not None else None,
    }


def _chosen(run: RunConfig) -> tuple[Overrides, list[str]]:
    """What `train` chooses on its workers, and what it says of it. It trains its steps, too."""
    code = launch.run(run, TARGET)
    if code:
        raise SystemExit(f"train with open axes ended with {code}")
    file = Path(run.out) / STRATEGY_FILE
    said = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# ")]
    return read(file), said


def _run(case: dict[str, Any], folder: Path) -> RunConfig:
    simulated = "cluster" in case
    memory = "auto" if simulated else {"device": case["device"], "host": case["host"]}
    text = [module.__file__ for module in (argparse, bisect, cmd, difflib)]
    precision = {"param": "float32", "compute": "bfloat16", "reduce": "float32"} if simulated else {}
    strategy: dict[str, Any] = {"axes": "auto", "memory": memory, "precision": precision}
    if not simulated:
        strategy |= {"check": False}
    data = {"train": text, "sequence": 4096 if simulated else 128, "cache": str(folder / "cache")}
    return files.from_dict(
        {
            "version": 1,
            "out": str(folder / "run"),
            "model": {"config": case["config"]},
            "data": data if simulated else {**data, "tokenizer": {"vocab_size": 512}},
            "train": {"batch": 2 * case["workers"] if simulated else 8, "steps": STEPS},
            "strategy": strategy,
            "launch": {"workers": case["workers"]},
            "trackers": [],
        }
    )


def _others(run: RunConfig, cluster: Cluster, world: int, picked: Overrides) -> Iterator[Overrides]:
    """The best other estimates, and plain sharding within the budget of the pick."""
    seen, constants = read_off(cluster, precision_of(run)) if is_measured(cluster) else (cluster, fitted())
    question = question_of(run, seen, world, 3 * OTHERS, moves=True, constants=constants)
    layers = question.workload.shape.layers
    done, alike = {_key(picked)}, Counter[str]()
    plain = {**picked, "strategy": {**picked["strategy"], "axes": {"shard": world}, "sequence": False}}
    plain["train"] = {"micro_batch": min(int(picked["train"]["micro_batch"]), run.train.batch // world)}
    plain["strategy"]["memory"] = {**picked["strategy"].get("memory", {}), "shard": "parameters"}
    listed = (
        overrides_of(run, one, question.cluster, layers, constants) for one in ranked(question, constants)
    )
    for laid in [plain, *listed]:
        axes = json.dumps(laid["strategy"]["axes"])
        if len(done) <= OTHERS and alike[axes] < ALIKE and _key(laid) not in done:
            done.add(_key(laid))
            alike[axes] += 1
            yield laid


def _key(laid: Overrides) -> str:
    return json.dumps(laid, sort_keys=True)


def _predicted(run: RunConfig, laid: Overrides, cluster: Cluster) -> tuple[float | None, str]:
    try:
        found = predict_run(resolved(run, laid), cluster)
    except HyperParallelError as error:
        return None, str(error)
    return (found.timeline.step, "") if found.fits is not False else (None, "its peak does not fit")


def _trained(run: RunConfig, laid: Overrides, folder: Path) -> tuple[float | None, str]:
    out = Path(tempfile.mkdtemp(dir=folder))
    try:
        one = resolved(run, laid).model_copy(update={"out": str(out)})
        code = launch.run(one, "hyper_parallel.train.entry:main")
    except HyperParallelError as error:
        return None, str(error)
    if code:
        return None, f"train ended with {code}"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row][2:]
    return statistics.median(seconds), ""


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        "What `strategy: auto` picks where memory is short, beside plain sharding and the other best estimates within "
        f"the same memory (`benchmarks/auto_budgets.py`). Each was trained for {found['steps']} steps, or simulated "
        "where the row says so:"
    )
    yield ""
    yield "| Machine | Budget | `auto` picked | Its step | Best | Of the best | Compared | Cannot run |"
    yield "|---|---|---|--:|--:|--:|--:|--:|"
    for name, one in found["cases"].items():
        rows = one["rows"]
        times = [row["seconds"] for row in rows if row["seconds"] is not None]
        axes = " · ".join(f"{axis} {degree}" for axis, degree in rows[0]["laid"]["strategy"]["axes"].items())
        budget = (
            f"{format_bytes(one['device'])}, host {format_bytes(one['host'])}" if one["device"] else "none"
        )
        own = "cannot run" if rows[0]["seconds"] is None else format_duration(rows[0]["seconds"])
        ratio = "" if one["ratio"] is None else f"{one['ratio']:.2f}"
        yield (
            f"| {name}{' (simulated)' if one['simulated'] else ''} | {budget} | {axes}, micro "
            f"{rows[0]['laid']['train']['micro_batch']} | {own} | {format_duration(min(times)) if times else ''} | "
            f"{ratio} | {len(rows)} | {len(rows) - len(times)} |"
        )
    yield ""
    yield f"Measured on {found['machine']['cpu']}, {found['machine']['cores']} cores."
    yield ""


if __name__ == "__main__":
    main()
