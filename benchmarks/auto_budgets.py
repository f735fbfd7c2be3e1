"""What `strategy: auto` picks where memory is short, beside other strategies: python benchmarks/auto_budgets.py

Three machines. This one, with 2 and with 4 workers, a budget below what plain data parallelism needs and a host tier:
`train` picks a strategy, after trials within the budget; then each strategy is trained for `STEPS` steps in turns with
the others, `ROUNDS` times; its time is the least median, the first two steps apart. Two simulated clusters, with
models whose state is more than the devices hold: each strategy is captured and simulated as `simulate` would.

The others are the best estimates with the budget in the search, at most `ALIKE` with the same degrees, and plain fully
sharded data parallelism within the same budget.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from auto import picked, run_of
from campaigns import Rows
from commandline import run
from pages import Benchmark, spaced, table
from processes import scratch
from shapes import LLAMA_405B, llama, with_layers

from hyper_parallel import launch
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate import predict_run
from hyper_parallel.planner.auto.candidates import ranked
from hyper_parallel.planner.auto.choose import choose
from hyper_parallel.planner.auto.entry import TARGET
from hyper_parallel.planner.auto.machine import is_measured, measured, read_off
from hyper_parallel.planner.auto.resolved import Overrides, overrides_of, precision_of, question_of, resolved
from hyper_parallel.planner.constants import fitted
from hyper_parallel.units import format_bytes, format_duration

OTHERS, ALIKE = 4, 1
STEPS = 6
ROUNDS = 3
"""Times that each strategy is trained, in turns."""
SMALL = llama(256, 4, 8, inner=768, vocabulary=2048)
CASES: dict[str, dict[str, Any]] = {
    "this machine, 2 workers": {"workers": 2, "config": SMALL, "device": "48MiB", "host": "256MiB"},
    "this machine, 4 workers": {"workers": 4, "config": SMALL, "device": "32MiB", "host": "256MiB"},
    "h100x8": {"cluster": "h100x8", "workers": 8, "config": with_layers(LLAMA_405B, 12)},
    "910cx8": {"cluster": "910cx8", "workers": 8, "config": with_layers(LLAMA_405B, 9)},
}


def _case(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The pick and the others, each with its seconds of a step; None where it cannot run."""
    world, simulated = case["workers"], "cluster" in case
    cluster = Cluster.named(case["cluster"]) if simulated else measured(world, print)
    config = _config(case, folder)
    begun = time.monotonic()
    if simulated:
        choice = choose(config, cluster, world, print)
        laid, said = choice.laid, list(choice.lines)
    else:
        laid, said = picked(config, TARGET)
    choosing = time.monotonic() - begun
    rows: list[dict[str, Any]] = [
        {"laid": one, "seconds": math.inf, "reason": ""}
        for one in [laid, *_others(config, cluster, world, laid)]
    ]
    for _ in range(1 if simulated else ROUNDS):
        for row in rows:
            if row["seconds"] is None:
                continue
            one = row["laid"]
            took, row["reason"] = (
                _predicted(config, one, cluster) if simulated else _trained(config, one, folder)
            )
            # Other load only adds to a step: the least of the rounds is nearest to the strategy's own time.
            row["seconds"] = None if took is None else min(took, row["seconds"])
            print(f"  {name}: {took} {row['reason']} {json.dumps(one['strategy'])}", flush=True)
    times = [row["seconds"] for row in rows if row["seconds"] is not None]
    memory = resolved(config, laid).strategy.memory
    return {
        "simulated": simulated,
        "device": memory.device,
        "host": memory.host,
        "choosing_s": choosing,
        "said": said,
        "rows": rows,
        "ratio": rows[0]["seconds"] / min(times) if rows[0]["seconds"] is not None else None,
    }


def _config(case: dict[str, Any], folder: Path) -> RunConfig:
    """The run of a case, whose axes are open."""
    world = case["workers"]
    if "cluster" in case:
        precision = {"param": "float32", "compute": "bfloat16", "reduce": "float32"}
        strategy: dict[str, Any] = {"memory": "auto", "precision": precision}
        data: dict[str, Any] = {"sequence": 4096}
    else:
        strategy = {"memory": {"device": case["device"], "host": case["host"]}, "check": False}
        data = {"sequence": 128, "tokenizer": {"vocab_size": 512}}
    train = {"batch": 2 * world if "cluster" in case else 8, "steps": STEPS}
    return run_of(folder, case["config"], world, {"axes": "auto", **strategy}, data=data, train=train)


def _others(config: RunConfig, cluster: Cluster, world: int, choice: Overrides) -> Iterator[Overrides]:
    """The best other estimates, and plain sharding within the budget of the pick."""
    seen, constants = read_off(cluster, precision_of(config)) if is_measured(cluster) else (cluster, fitted())
    question = question_of(config, seen, world, 3 * OTHERS, moves=True, constants=constants)
    layers = question.workload.shape.layers
    done, alike = {_key(choice)}, Counter[str]()
    strategy = choice["strategy"]
    memory = {**strategy.get("memory", {}), "shard": "parameters"}
    plain = {
        **choice,
        "strategy": {**strategy, "axes": {"shard": world}, "sequence": False, "memory": memory},
        "train": {"micro_batch": min(int(choice["train"]["micro_batch"]), config.train.batch // world)},
    }
    listed = (
        overrides_of(config, one, question.cluster, layers, constants) for one in ranked(question, constants)
    )
    for laid in [plain, *listed]:
        axes = json.dumps(laid["strategy"]["axes"])
        if len(done) <= OTHERS and alike[axes] < ALIKE and _key(laid) not in done:
            done.add(_key(laid))
            alike[axes] += 1
            yield laid


def _key(laid: Overrides) -> str:
    return json.dumps(laid, sort_keys=True)


def _predicted(config: RunConfig, laid: Overrides, cluster: Cluster) -> tuple[float | None, str]:
    try:
        found = predict_run(resolved(config, laid), cluster)
    except HyperParallelError as error:
        return None, str(error)
    return (found.timeline.step, "") if found.fits is not False else (None, "its peak does not fit")


def _trained(config: RunConfig, laid: Overrides, folder: Path) -> tuple[float | None, str]:
    out = Path(tempfile.mkdtemp(dir=folder))
    try:
        one = resolved(config, laid).model_copy(update={"out": str(out)})
        code = launch.run(one, "hyper_parallel.train.entry:main")
    except HyperParallelError as error:
        return None, str(error)
    if code:
        return None, f"train ended with {code}"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row][2:]
    return statistics.median(seconds), ""


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/plan-memory.md."""
    return spaced(
        "What `strategy: auto` picks where memory is short, beside plain sharding and the other best estimates within "
        f"the same memory (`benchmarks/auto_budgets.py`). Each was trained for {found['steps']} steps, or simulated "
        "where the row says so:",
        table(
            "Machine | Budget | `auto` picked | Its step | Best | Of the best | Compared | Cannot run",
            (tuple(_cells(name, one)) for name, one in found["cases"].items()),
            "lllrrrrr",
        ),
        f"Measured on {found['machine']['cpu']}, {found['machine']['cores']} cores.",
    )


def _cells(name: str, one: Mapping[str, Any]) -> Iterator[object]:
    picked, *_ = rows = one["rows"]
    times = [row["seconds"] for row in rows if row["seconds"] is not None]
    axes = " · ".join(f"{axis} {degree}" for axis, degree in picked["laid"]["strategy"]["axes"].items())
    yield f"{name}{' (simulated)' if one['simulated'] else ''}"
    yield f"{format_bytes(one['device'])}, host {format_bytes(one['host'])}" if one["device"] else "none"
    yield f"{axes}, micro {picked['laid']['train']['micro_batch']}"
    yield "cannot run" if picked["seconds"] is None else format_duration(picked["seconds"])
    yield format_duration(min(times)) if times else ""
    yield "" if one["ratio"] is None else f"{one['ratio']:.2f}"
    yield from (len(rows), len(rows) - len(times))


BENCHMARK = Benchmark("auto_budgets", {"plan-memory.md": page}, key="cases")


def main(cases: Annotated[tuple[str, ...], tuple(CASES)] = tuple(CASES)) -> None:
    """Measure or simulate each case; one that is left out keeps its earlier row."""
    rows = Rows(BENCHMARK, summary=lambda rows: {"steps": STEPS})
    for name in cases:
        with scratch() as folder:
            rows.add(name, _case(name, CASES[name], folder))


if __name__ == "__main__":
    run(main)
