"""Predicted against measured memory: python benchmarks/memory.py

For each model and strategy, in fresh processes (several over gloo where the strategy has ranks), the step's graph is
captured and run, and its peak is known three times:

- predicted: `graph.liveness.peak`, from the graph alone;
- live: what an observer sees that knows nothing of the graph, every untyped storage alive while the graph runs;
- resident: the process's high-water mark in another step, over what it held before the state was allocated. What gloo
  takes for itself is in it, and predicted by `graph.liveness`; so is what kernels do, which is not.

The tables of docs/memory.md are written from the results.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from commandline import run
from measure import taken_seconds
from pages import Benchmark, table
from processes import TRIMMED, fresh, workers
from shapes import NO_ENDS, Fields, gpt2, llama, with_layers
from training import build, captured, graph_inputs, recipe_of, silent_host, step_batch

import hyper_parallel as hp
from harness.observer import Observer
from hyper_parallel.compat import registry
from hyper_parallel.graph import executable, lifetimes, peak, rewritten, workspaces
from hyper_parallel.graph.liveness import peak_of
from hyper_parallel.offloading.pass_pipeline import passes

ROWS, POSITIONS = 4, 256
SHAPE = llama(512, 4, 8, vocabulary=8192, positions=1024, **NO_ENDS, pad_token_id=None)
_MOE = {**SHAPE, "num_hidden_layers": 3, "intermediate_size": 768, "num_experts_per_tok": 2}
MODELS: dict[str, Fields] = {
    "llama": SHAPE,
    "llama, wide": {**SHAPE, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2},
    "llama, tied": {**SHAPE, "tie_word_embeddings": True},
    "gpt2": gpt2(512, 4, 8, vocabulary=8192, positions=1024, **NO_ENDS),
    "gemma": {**SHAPE, "model_type": "gemma", "head_dim": 64},
    "mixtral": {**_MOE, "model_type": "mixtral", "num_local_experts": 8},
    "qwen3-moe": {
        **_MOE,
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 16,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
    },
    "deepseek-v3": {
        **_MOE,
        "model_type": "deepseek_v3",
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


def observed(
    fields: Fields, strategy: hp.Strategy, rows: int = ROWS, positions: int = POSITIONS
) -> dict[str, float]:
    """One rank's three peaks, in bytes. `rows` are of all ranks together."""
    model = build(fields, strategy)
    mine = rows // hp.sharded(model).strategy.axes.data
    step = rewritten(captured(model, mine, positions), passes(strategy, ordered=False))
    predicted, graph = peak(step).bytes, executable(step)
    with_workspaces = peak_of([*lifetimes(step), *workspaces(step)]).bytes
    backend = registry.backend("cpu")
    collected()
    before = backend.memory_allocated()
    hp.init_weights(model, seed=0)
    recipe = recipe_of(model)
    tensors = graph_inputs(recipe, step_batch(recipe, rows, positions, fields["vocab_size"]))
    with Observer(list(tensors.values())) as observer:
        graph.run(tensors, silent_host)
    collected()
    backend.reset_memory_peak()
    seconds = taken_seconds(partial(graph.run, tensors, silent_host))
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


def worker(rank: int, world: int, model: str, strategy: str) -> dict[str, float]:
    """One rank's process: a small step first, which loads kernels and connects the ranks, then the measured one."""
    declared = hp.Strategy(**STRATEGIES[strategy])
    small = with_layers(MODELS[model], 1 if model == "gpt2" else 2)
    observed(small, declared, rows=2, positions=32)
    return observed(MODELS[model], declared)


def measured(model: str, strategy: str) -> dict[str, float]:
    """The first rank's peaks, from fresh processes."""
    world = hp.Strategy(**STRATEGIES[strategy]).axes.world
    if world == 1:  # without a group
        return dict(fresh(worker, 0, 1, model, strategy, **TRIMMED))
    return dict(workers(worker, world, model, strategy, **TRIMMED)[0])


def page(kept: Mapping[str, Any]) -> Iterator[str]:
    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        live, resident = row["predicted"] / row["live"], row["with_workspaces"] / row["resident"]
        mb = [f"{row[key] / 1e6:.1f} MB" for key in ("predicted", "live", "with_workspaces", "resident")]
        off = f"{100 * live - 100:+.2f}%", f"{100 * resident - 100:+.1f}%"
        return row["model"], row["strategy"], *mb[:2], off[0], *mb[2:], off[1]

    yield from table(
        "Model | Strategy | Predicted | Live bytes | off by | Predicted, with workspaces | Resident | off by",
        map(cells, kept["measured"]),
    )


BENCHMARK = Benchmark("memory", {"memory.md": page})


def main() -> None:
    rows: list[dict[str, Any]] = []
    for model, strategy in product(MODELS, STRATEGIES):
        rows.append({"model": model, "strategy": strategy, **measured(model, strategy)})
        print([*page({"measured": rows})][-1], flush=True)
    BENCHMARK.keep({"rows": ROWS, "positions": POSITIONS, "measured": rows})


if __name__ == "__main__":
    run(main)
