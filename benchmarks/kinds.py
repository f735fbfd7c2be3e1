"""Hybrids, adapters and formats: simulated steps beside closed forms by class of work, and errors on published runs.

    python benchmarks/kinds.py          writes benchmarks/results/kinds.json

Simulated steps are those of small models as captured, on a preset's device; nothing is measured here but by the
published runs' sources. The closed forms leave out `fixed`, the work of a step's host, which the simulator has not.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from commandline import run
from fit_constants.published_runs import RUNS
from pages import Benchmark
from shapes import Fields, llama, run_file

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import from_dict
from hyper_parallel.estimate.predict import predict_run
from hyper_parallel.planner.auto.resolved import workload_of
from hyper_parallel.planner.constants import fitted
from hyper_parallel.planner.cost_model.step import estimate, seconds_by_kind
from hyper_parallel.planner.csv_runs.cells import records
from hyper_parallel.planner.csv_runs.rows import rows
from hyper_parallel.planner.framework_profiles import profile
from hyper_parallel.planner.table import Table
from hyper_parallel.simulator.op_costs import Costs

BENCHMARK = Benchmark("kinds")
SIZES = {"vocab_size": 32000, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
MODELS: dict[str, Fields] = {
    "llama": llama(4096, 2, 32, inner=11008, kv=32, vocabulary=32000, positions=2048),
    "llama, narrow": llama(2048, 4, 16, inner=8192, kv=4, vocabulary=32000, positions=2048),
    "lfm2": {
        "model_type": "lfm2",
        **SIZES,
        "intermediate_size": 12288,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "bamba": {
        "model_type": "bamba",
        **SIZES,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "attn_layer_indices": [1],
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **SIZES,
        "intermediate_size": 5632,
        "num_hidden_layers": 2,
        "head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
CLASSES = {
    "products and recurrences": ("products", "attention"),
    "head": ("head",),
    "elementwise": ("elementwise", "launches"),
    "gradients and update": ("sums", "gradients", "optimizer"),
}
"""Parts of an estimate by class; `fixed`, the work of a step's host, is none of the simulator's."""


def beside(name: str, adapter: Any = None) -> dict[str, tuple[float, float]]:
    """Seconds by class and in all (`step`): simulated, and estimated without the step's fixed part."""
    precision = {"param": "bfloat16", "compute": "bfloat16"}
    file = run_file(MODELS[name], sequence=1024, train={"batch": 4}, strategy={"precision": precision})
    file["model"]["adapter"] = adapter
    config = from_dict(file, source="kinds")
    cluster = Cluster.named("h100x1")
    predicted = predict_run(config, cluster)
    table = Table.of(workload_of(config), cluster, profile("hyper-parallel"), micro=4.0)
    parts = {kind: float(part[0]) for kind, part in seconds_by_kind(table, fitted()).items()}
    costs = Costs(cluster)
    by_class: dict[str, float] = defaultdict(float)
    for op in (op for ops in predicted.timeline.trace.ops.values() for op in ops):
        if op.work is not None:
            by_class[_class(op.module, op.phase, op.work.kind)] += costs.seconds(op)
    found = {kind: (by_class[kind], sum(parts[part] for part in of)) for kind, of in CLASSES.items()}
    return {**found, "step": (predicted.timeline.step, sum(parts.values()) - parts["fixed"])}


def _class(module: str, phase: str, kind: str) -> str:
    if phase in ("clip", "optimizer"):
        return "gradients and update"
    if phase == "loss" or module.endswith(("lm_head", "embed_tokens")):
        return "head"
    return "products and recurrences" if kind in ("matmul", "attention") else "elementwise"


def published() -> list[dict[str, Any]]:
    """Runs of hybrids and of adapters: estimated and measured seconds of a step."""
    given = [one for one in records(RUNS) if "Nemotron_3" in one["model"] or "task=LoRA" in one["notes"]]
    table, found = rows(given)
    seconds = np.broadcast_to(estimate(table, fitted()).seconds, table.n)
    told = []
    for row, one in zip(found, given, strict=True):
        assert row.index is not None, row.unsupported
        at = row.index
        tokens = float(table.batch[at] * table.sequence[at])
        measured = tokens / float(one["tokens_per_s_per_device"]) / float(table.devices[at])
        shown = {name: one[name] for name in ("row_id", "model", "hardware", "precision", "framework")}
        error = round(float(seconds[at]) / measured - 1, 4)
        told.append({**shown, "estimated_s": float(seconds[at]), "measured_s": measured, "error": error})
    return told


def main() -> None:
    """Compare, keep."""
    cases = [(name, None) for name in MODELS] + [("llama", {"rank": 16}), ("llama, narrow", {"rank": 16})]
    compared = []
    for name, adapter in cases:
        classes = {
            kind: {"simulated_ms": round(one * 1e3, 3), "estimated_ms": round(other * 1e3, 3)}
            for kind, (one, other) in beside(name, adapter).items()
        }
        compared.append({"model": name, "adapter": adapter, "classes": classes})
    BENCHMARK.keep({"preset": "h100x1", "compared": compared, "published": published()})


if __name__ == "__main__":
    run(main)
