"""CPU seconds and memory before the first step, of five models: python benchmarks/first_step.py

Capture, passes and executables of one rank's step, on a simulated process group of the strategy's world and on the meta
device: what every rank of `train` does before its first step, but for the values. A row is measured in processes, once
cold, with an empty cache of captured steps, and once cached. Seconds are of the process's processors, the fewest of
`--repeats` processes, since what else runs on the machine makes them more; memory is what the resident set has grown by
at most. The order of collectives is planned for the row's cluster.
"""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from commandline import run
from pages import Benchmark, table
from processes import fresh, scratch
from shapes import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTRAL_8X22B, Fields

COUNTS = (1, 4, 16, 64)


def _on(cluster: str, *, sequence: bool = True) -> Fields:
    return {"sequence": sequence, "overlap": {"cluster": cluster}}


MODELS: dict[str, tuple[Fields, Fields]] = {
    "llama-3-8b": (LLAMA_8B, {"axes": {"shard": 8}, **_on("h100x8", sequence=False)}),
    "llama-3-70b": (LLAMA_70B, {"axes": {"shard": 8, "tensor": 8}, **_on("h100x64")}),
    "llama-3-405b": (LLAMA_405B, {"axes": {"shard": 64, "tensor": 8}, **_on("h100x512")}),
    "mixtral-8x22b": (
        {**MIXTRAL_8X22B, "max_position_embeddings": 131072},
        {"axes": {"shard": 64, "expert": 8}, **_on("h100x64", sequence=False)},
    ),
    "deepseek-v3": (DEEPSEEK_V3, {"axes": {"shard": 256, "tensor": 8, "expert": 64}, **_on("h800x2048")}),
}
"""Name to the model's config and its strategy."""
SCHEDULES = ("overlap", "usual")
"""Of collectives: simulated on the cluster, or FSDP's, as where nothing is known of the device."""


def measured(name: str, count: int, schedule: str, cache: Path) -> dict[str, Any]:
    """One step's way to its executables, in this process."""
    import torch
    from training import shape_of
    from transformers import AutoConfig, AutoModelForCausalLM

    from hyper_parallel.compat.fake_tensors import fake_ranks
    from hyper_parallel.config.train import AdamWConfig, LossConfig, ScheduleConfig
    from hyper_parallel.shard import parallelize, sharded
    from hyper_parallel.step.graph_cache import Graphs
    from hyper_parallel.step.graph_store import GraphStore
    from hyper_parallel.step.lr_schedule import schedule as schedule_of
    from hyper_parallel.step.optimizer import build_optimizer
    from hyper_parallel.step.recipe import Recipe
    from hyper_parallel.strategy import Strategy

    fields, declared = MODELS[name]
    if schedule == "usual":
        declared = {**declared, "overlap": {"schedule": "usual"}}
    strategy = Strategy.model_validate({"version": 1, "check": False, **declared})
    with fake_ranks(strategy.axes.world, 0):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
        began = time.process_time()
        parallelize(model, strategy, lowering="traceable")
        parallel = time.process_time() - began
        optimizer, rate = build_optimizer(model, AdamWConfig()), schedule_of(ScheduleConfig(), 1)
        recipe = Recipe(model, sharded(model), optimizer, rate, loss=LossConfig())
        graphs = Graphs(recipe, "cpu", store=GraphStore(cache))
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        shape = shape_of(1, 1024, count)
        graphs.stored(shape)
        if not graphs.ready(shape):
            raise SystemExit(graphs.refused)
        seconds = time.process_time() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    (captured,) = graphs.captured
    return {
        "model": name,
        "layers": model.config.num_hidden_layers,
        "devices": strategy.axes.world,
        "schedule": schedule,
        "micro_batches": count,
        "cpu_seconds": round(seconds, 2),
        "parallelize_seconds": round(parallel, 2),
        "memory_bytes": grown,
        "nodes": sum(1 for _ in captured.plain.nodes),
    }


def row_of(repeats: int, *step: Any) -> dict[str, Any]:
    """Cold and cached, the fewest seconds of each."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        with scratch() as cache:
            for state in ("cold", "cached"):
                row = fresh(measured, *step, cache)
                found[state] = min(row, found.get(state, row), key=lambda one: one["cpu_seconds"])
    cached = {f"cached_{key}": found["cached"][key] for key in ("cpu_seconds", "memory_bytes")}
    return {**found["cold"], **cached}


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/first-step.md."""

    def cells(row: Mapping[str, Any]) -> Iterator[object]:
        yield from (row["model"], row["devices"], row["schedule"], row["micro_batches"], f"{row['nodes']:,}")
        yield from (f"{row[key]:.1f}" for key in ("cpu_seconds", "cached_cpu_seconds"))
        yield from (f"{row[key] / 2**20:.0f}" for key in ("memory_bytes", "cached_memory_bytes"))

    columns = "Model|Devices|Order|Micro-batches|Nodes|Cold, s|Cached, s|Memory cold, MiB|Memory cached, MiB"
    yield from table(columns, (list(cells(row)) for row in result["rows"]))


BENCHMARK = Benchmark("first_step", {"first-step.md": page})


def main(
    models: Annotated[tuple[str, ...], tuple(MODELS)] = tuple(MODELS),
    schedule: Annotated[str, SCHEDULES] = "overlap",
    counts: tuple[int, ...] = COUNTS,
    repeats: int = 2,
) -> None:
    """Measure each row in processes of its own."""
    rows = {_key(row): row for row in BENCHMARK.kept().get("rows", [])}
    for name, count in itertools.product(models, counts):
        made = row_of(repeats, name, count, schedule)
        print(made, flush=True)
        rows[_key(made)] = made
        # After each row: a run that is stopped has measured what it has measured.
        BENCHMARK.keep({"rows": [rows[key] for key in sorted(rows)]})


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart."""
    return row["model"], row["schedule"], row["micro_batches"]


if __name__ == "__main__":
    run(main)
