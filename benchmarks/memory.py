"""Predicted against measured memory: python benchmarks/memory.py

For each model and strategy, in fresh processes (several over gloo where the strategy has ranks), the step's graph is
captured and run, and its peak is known three times:

- predicted: `graph.liveness.peak`, from the graph alone;
- live: what an observer sees that knows nothing of the graph, every untyped storage alive while the graph runs;
- resident: the process's high-water mark in another step, over what it held before the state was allocated. What gloo
  takes for itself is in it, and predicted by `graph.workspaces`; so is what kernels do, which is not.

The tables of docs/memory.md are written from the results.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import RESULTS, write
from pages import DOCS, put
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from harness.observer import Observer
from hyper_parallel.compat import registry
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.graph import executable, lifetimes, peak, rewritten, workspaces
from hyper_parallel.graph.liveness import peak_of
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_train_step import BatchShape, batch_inputs, capture_step, state
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe

ROWS, POSITIONS = 4, 256
RESULT = RESULTS / "memory.json"
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2}
_MOE = {**SHAPE, "num_hidden_layers": 3, "intermediate_size": 768, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPE},
    "llama, wide": {
        "model_type": "llama",
        **SHAPE,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 2,
    },
    "llama, tied": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 8192,
        "n_embd": 512,
        "n_layer": 4,
        "n_head": 8,
        "n_positions": 1024,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gemma": {"model_type": "gemma", **SHAPE, "head_dim": 64},
    "mixtral": {"model_type": "mixtral", **_MOE, "num_local_experts": 8},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **_MOE,
        "head_dim": 64,
        "num_experts": 16,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_MOE,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 384,
        "first_k_dense_replace": 1,
    },
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one device": {},
    "recompute layers": {"memory": {"recompute": "layer"}},
    "shard 2": {"axes": {"shard": 2}},
    "tensor 2": {"axes": {"tensor": 2}, "sequence": True},
}


def build(fields: Mapping[str, Any], strategy: hp.Strategy) -> nn.Module:
    """A model of these fields on the meta device, parallelized."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "grouped_mm"
    return hp.parallelize(model, strategy, lowering="traceable")


def recipe_of(model: nn.Module) -> Recipe:
    """The step that trains it."""
    optimizer = build_optimizer(model, AdamWConfig(lr=1e-3))
    return Recipe(
        model, hp.sharded(model), optimizer, schedule(ScheduleConfig(name="constant"), 1000), clip=1.0
    )


def batch_of(share: int, rows: int, positions: int, vocabulary: int) -> MicroBatch:
    """A rank's rows."""
    ids = torch.randint(vocabulary, (rows, positions + 1), generator=torch.Generator().manual_seed(share))
    places = torch.arange(positions).expand(rows, -1).contiguous()
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), places, torch.arange(rows))


def answer(point: str, values: Sequence[Tensor]) -> Tensor | None:
    """The host: it has nothing to say and refuses nothing."""
    return torch.zeros(CONTROL_VECTOR) if point == "load" else None


def observed(
    fields: Mapping[str, Any], strategy: hp.Strategy, rows: int = ROWS, positions: int = POSITIONS
) -> dict[str, float]:
    """One rank's three peaks, in bytes. `rows` are of all ranks together."""
    model = build(fields, strategy)
    handle = hp.sharded(model)
    mine = rows // handle.strategy.axes.data
    step = rewritten(
        capture_step(recipe_of(model), BatchShape(((mine, positions),), (False,))),
        passes(strategy, ordered=False),
    )
    predicted, run = peak(step).bytes, executable(step)
    with_workspaces = peak_of([*lifetimes(step), *workspaces(step)]).bytes
    backend = registry.backend("cpu")
    collected()
    before = backend.memory_allocated()
    hp.init_weights(model, seed=0)
    recipe = recipe_of(model)
    micro = batch_of(handle.data_index, mine, positions, fields["vocab_size"])
    tensors = {
        **{name: tensor.detach() for name, (_, tensor) in state(handle, recipe.optimizer).items()},
        **batch_inputs(
            [micro],
            torch.tensor(0),
            torch.tensor(float(rows * positions)),
            torch.ones((), dtype=torch.float64),
        ),
    }
    with Observer(list(tensors.values())) as observer:
        run.run(tensors, answer)
    collected()
    backend.reset_memory_peak()
    begun = time.perf_counter()
    run.run(tensors, answer)
    seconds = time.perf_counter() - begun
    return {
        "predicted": float(predicted),
        "with_workspaces": float(with_workspaces),
        "live": float(observer.peak),
        "resident": float(backend.memory_peak() - before),
        "nodes": float(len(list(step.nodes))),
        "seconds": seconds,
    }


def collected() -> None:
    """Give back what nobody holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def worker(model: str, strategy: str, rank: int, meeting: str) -> None:
    """One rank's process: a small step first, which loads kernels and connects the ranks, then the measured one."""
    torch.set_num_threads(1)
    declared = hp.Strategy(**STRATEGIES[strategy])
    world = declared.axes.world
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    small = {**MODELS[model], **({"n_layer": 1} if model == "gpt2" else {"num_hidden_layers": 2})}
    observed(small, declared, rows=2, positions=32)
    found = observed(MODELS[model], declared)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    print(json.dumps(found))


def measured(model: str, strategy: str) -> dict[str, float]:
    """The first rank's peaks, from fresh processes."""
    world = hp.Strategy(**STRATEGIES[strategy]).axes.world
    # Large blocks come from the system and go back to it, so that the process holds what its tensors hold.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, __file__, "--worker", model, strategy, str(rank), str(Path(folder) / "meeting")]
            for rank in range(world)
        ]
        started = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, text=True) for c in commands]
        said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{model}, {strategy}: a worker failed")
    found: dict[str, float] = json.loads(said[0].splitlines()[-1])
    return found


def page(kept: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/memory.md."""
    yield "| Model | Strategy | Predicted | Live bytes | off by | Predicted, with workspaces | Resident | off by |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in kept["measured"]:
        live, resident = row["predicted"] / row["live"], row["with_workspaces"] / row["resident"]
        mb = [f"{row[key] / 1e6:.1f} MB" for key in ("predicted", "live", "with_workspaces", "resident")]
        yield (
            f"| {row['model']} | {row['strategy']} | {mb[0]} | {mb[1]} | {100 * live - 100:+.2f}% "
            f"| {mb[2]} | {mb[3]} | {100 * resident - 100:+.1f}% |"
        )


def main() -> None:
    """Measure, write benchmarks/results/memory.json and the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    given = arguments.parse_args()
    if given.worker:
        model, strategy, rank, meeting = given.worker
        worker(model, strategy, int(rank), meeting)
        return
    for model in given.models:
        for strategy in given.strategies:
            row = {"model": model, "strategy": strategy, **measured(model, strategy)}
            print([*page({"measured": [row]})][-1], flush=True)
            keep(row)


def keep(row: Mapping[str, Any]) -> None:
    """Put a row into the results, in the place of an earlier one, and write the table anew."""
    there = json.loads(RESULT.read_text())["measured"] if RESULT.exists() else []
    known = {(each["model"], each["strategy"]): each for each in [*there, row]}
    rows = [known[model, s] for model in MODELS for s in STRATEGIES if (model, s) in known]
    write("memory", {"rows": ROWS, "positions": POSITIONS, "measured": rows})
    put(DOCS / "memory.md", "memory.py", page({"measured": rows}))


if __name__ == "__main__":
    main()
