"""CPU seconds and memory before the first step, of five models: python benchmarks/first_step.py

Capture, passes and executables of one rank's step, on a simulated process group of the strategy's world and on the meta
device: what every rank of `train` does before its first step, but for the values. A row is measured in processes, once
cold, with an empty cache of captured steps, and once cached. Seconds are of the process's processors, the fewest of
`--repeats` processes, since what else runs on the machine makes them more; memory is what the resident set has grown by
at most. The order of collectives is planned for the row's cluster. `--layers` gives models fewer or more layers, which
shows the growth with distinct work. `--whole` writes the step out as one graph of all micro-batches, as for a profile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import RESULTS, write

COUNTS = (1, 4, 16, 64)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "first-step.md"

_LLAMA = {"model_type": "llama", "vocab_size": 128256}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-3-8b": (
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        {"axes": {"shard": 8}, "overlap": {"cluster": "h100x8"}},
    ),
    "llama-3-70b": (
        {
            **_LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
        {"axes": {"shard": 8, "tensor": 8}, "sequence": True, "overlap": {"cluster": "h100x64"}},
    ),
    "llama-3-405b": (
        {
            **_LLAMA,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
        },
        {"axes": {"shard": 64, "tensor": 8}, "sequence": True, "overlap": {"cluster": "h100x512"}},
    ),
    "mixtral-8x22b": (
        {
            "model_type": "mixtral",
            "vocab_size": 32768,
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {"axes": {"shard": 64, "expert": 8}, "overlap": {"cluster": "h100x64"}},
    ),
    "deepseek-v3": (
        _DEEPSEEK,
        {
            "axes": {"shard": 256, "tensor": 8, "expert": 64},
            "sequence": True,
            "overlap": {"cluster": "h800x2048"},
        },
    ),
}
"""Name to the model's config and its strategy."""
KEYS = ("model", "layers", "schedule", "micro_batches")
"""What tells rows apart."""
SCHEDULES = ("overlap", "usual")
"""Of collectives: simulated on the cluster, or FSDP's, as where nothing is known of the device."""


def measured(
    name: str, layers: int | None, count: int, schedule: str, whole: bool, cache: Path
) -> dict[str, Any]:
    """One step's way to its executables, in this process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hyper_parallel.compat.fake_process_group import fake_ranks
    from hyper_parallel.config.train import AdamWConfig, LossConfig, ScheduleConfig
    from hyper_parallel.shard import parallelize, sharded
    from hyper_parallel.step.capture_train_step import BatchShape
    from hyper_parallel.step.graph_cache import Graphs
    from hyper_parallel.step.graph_store import GraphStore
    from hyper_parallel.step.lr_schedule import schedule as schedule_of
    from hyper_parallel.step.optimizer import build_optimizer
    from hyper_parallel.step.recipe import Recipe
    from hyper_parallel.strategy import Strategy

    settings, fields = MODELS[name]
    settings = {**settings, **({"num_hidden_layers": layers} if layers else {})}
    if schedule == "usual":
        fields = {**fields, "overlap": {"schedule": "usual"}}
    kind = settings.pop("model_type")
    strategy = Strategy.model_validate({"version": 1, "check": False, **fields})
    with fake_ranks(strategy.axes.world, 0):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
        began = time.process_time()
        parallelize(model, strategy, lowering="traceable")
        parallel = time.process_time() - began
        recipe = Recipe(
            model,
            sharded(model),
            build_optimizer(model, AdamWConfig()),
            schedule_of(ScheduleConfig(), 1),
            loss=LossConfig(),
        )
        graphs = Graphs(recipe, "cpu", whole=whole, store=GraphStore(cache))
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        shape = BatchShape(((1, 1024),) * count, (False,) * count)
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


def main() -> None:
    """Measure each row in processes of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layers", type=int, help="of every model; its own when left out")
    parser.add_argument("--schedule", choices=SCHEDULES, default="overlap")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "COUNT", "CACHE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        name, count, cache = asked.one
        row = measured(name, asked.layers, int(count), asked.schedule, asked.whole, Path(cache))
        print(json.dumps(row))
        return
    report = "first_step_whole" if asked.whole else "first_step"
    path = RESULTS / f"{report}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in asked.models:
        for count in asked.counts:
            made = _row(name, count, asked)
            print(made, flush=True)
            # In the place of the row that was measured before.
            rows = [one for one in rows if any(one.get(key) != made[key] for key in KEYS)]
            rows = sorted([*rows, made], key=lambda one: [one[key] for key in KEYS])
            # After each row: a run that is stopped has measured what it has measured.
            write(report, {"rows": rows})
            if not asked.whole and asked.layers is None:
                PAGE.write_text(page(rows))


def _row(name: str, count: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Cold and cached, the fewest seconds of each."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(asked.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "cached"):
                row = _one(name, count, cache, asked)
                found[state] = min(row, found.get(state, row), key=lambda one: one["cpu_seconds"])
    cold, cached = found["cold"], found["cached"]
    return {
        **cold,
        "cached_cpu_seconds": cached["cpu_seconds"],
        "cached_memory_bytes": cached["memory_bytes"],
    }


def _one(name: str, count: int, cache: str, asked: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, str(count), cache, "--schedule", asked.schedule]
    command += ["--layers", str(asked.layers)] if asked.layers else []
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command + ["--whole"] * asked.whole, check=True, capture_output=True, text=True, env=environ
    )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def page(rows: list[dict[str, Any]]) -> str:
    """docs/first-step.md."""
    lines = [
        "# Time before the first step",
        "",
        "What one rank does between the command and its first step, but for loading data and weights: capture, passes "
        "and executables of the step's graph ([graph.md](graph.md)). CPU seconds of the process and growth of its "
        "resident memory, measured on the meta device with a simulated process group of the strategy's world. "
        "*Cached*: the step is read from the cache of captured steps. The order of collectives is simulated on the "
        "cluster (`overlap`), or that of FSDP (`usual`, where nothing is known of the device).",
        "",
        "Written by `python benchmarks/first_step.py`, which writes the figures and the machine to "
        "`benchmarks/results/first_step.json`.",
        "",
        "| Model | Devices | Order | Micro-batches | Nodes | Cold, s | Cached, s "
        "| Memory cold, MiB | Memory cached, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory, kept = (row[key] / 2**20 for key in ("memory_bytes", "cached_memory_bytes"))
        lines.append(
            f"| {row['model']} | {row['devices']} | {row['schedule']} | {row['micro_batches']} | {row['nodes']:,} "
            f"| {row['cpu_seconds']:.1f} | {row['cached_cpu_seconds']:.1f} | {memory:.0f} | {kept:.0f} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
