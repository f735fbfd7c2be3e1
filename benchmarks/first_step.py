"""CPU seconds and memory before the first step, by the number of micro-batches: python benchmarks/first_step.py

Capture, passes and executables of a step of the shape of Llama 3 70B (80 layers, `--layers`), on 8 devices that share
the weights, 1 × 1024 tokens a micro-batch. Each number of micro-batches is measured in a process of its own, on one
rank of a simulated process group and on the meta device: what every rank of `train` does before its first step, but for
the values. Seconds are of the process's processors, the fewest of `--repeats` processes, since what else runs on the
machine makes them more; memory is what the resident set has grown by at most. `--whole` writes the step out as one
graph of all micro-batches, as for a profile.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from measure import write

COUNTS = (1, 4, 16, 64)


def measured(layers: int, count: int, whole: bool) -> dict[str, Any]:
    """One step's way to its executables, in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hyper_parallel.compat.fake_process_group import fake_ranks
    from hyper_parallel.config.train import AdamWConfig, LossConfig, ScheduleConfig
    from hyper_parallel.shard import parallelize, sharded
    from hyper_parallel.step.capture_train_step import BatchShape
    from hyper_parallel.step.graph_cache import Graphs
    from hyper_parallel.step.lr_schedule import schedule
    from hyper_parallel.step.optimizer import build_optimizer
    from hyper_parallel.step.recipe import Recipe
    from hyper_parallel.strategy import Strategy

    shape = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with fake_ranks(8, 0):
        with torch.device("meta"):
            model = LlamaForCausalLM(shape)
        parallelize(model, Strategy(axes={"shard": 8}, check=False), lowering="traceable")
        recipe = Recipe(
            model,
            sharded(model),
            build_optimizer(model, AdamWConfig()),
            schedule(ScheduleConfig(), 1),
            loss=LossConfig(),
        )
        graphs = Graphs(recipe, "cpu", whole=whole)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        if not graphs.ready(BatchShape(((1, 1024),) * count, (False,) * count)):
            raise SystemExit(graphs.refused)
        seconds = time.process_time() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    (captured,) = graphs.captured
    return {
        "micro_batches": count,
        "cpu_seconds": round(seconds, 2),
        "memory_bytes": grown,
        "nodes": sum(1 for _ in captured.plain.nodes),
    }


def main() -> None:
    """Measure each number of micro-batches in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(measured(asked.layers, asked.one, asked.whole)))
        return
    found: dict[int, dict[str, Any]] = {}
    for count in asked.counts * asked.repeats:
        command = [sys.executable, __file__, "--one", str(count), "--layers", str(asked.layers)]
        done = subprocess.run(command + ["--whole"] * asked.whole, check=True, capture_output=True, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        print(row, flush=True)
        found[count] = min(row, found.get(count, row), key=lambda one: one["cpu_seconds"])
    rows = list(found.values())
    for row in rows:
        row["ratio"] = round(row["cpu_seconds"] / rows[0]["cpu_seconds"], 3)
    name = "first_step_whole" if asked.whole else "first_step"
    write(name, {"layers": asked.layers, "devices": 8, "rows": rows})


if __name__ == "__main__":
    main()
