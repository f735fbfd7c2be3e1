"""A Llama-3-8B and a DeepSeek-V3 on eight Ascend 910C, with recomputation and with a budget. Part of `offload.py`.

Simulated, on the preset of CloudMatrix384. Beside it stands what is published of HyperOffload (arXiv 2602.00748): 5.2
to 4.08 s a step, and 2.5 to 2.19 s. With which batch, sequence, precision and parallel strategy is not known to us. So
what a step computes is assumed, the batch such that the baseline takes about as long as the published one, and only the
ratios can be compared. A device is what PyTorch sees, half of a package with 64 GB.

The baseline computes layers again in the backward pass, since the step does not fit the device's memory otherwise; with
the budget nothing is computed again that need not be, and what does not fit goes to the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shapes import DEEPSEEK_V3, LLAMA_8B, Fields, run_file, with_layers

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import from_dict
from hyper_parallel.estimate import predict_run

WAYS: dict[str, dict[str, Any]] = {
    "baseline: layers computed again": {"recompute": "layer"},
    "nothing computed again (too large)": {},
    # Of the 64 GB of a device: the rest is for what kernels and the runtime take. The host's are for each device.
    "ours, within a budget": {"device": "54GB", "host": "170GB", "expert_load": 1.0},
}
"""Name to `strategy.memory`."""


@dataclass(frozen=True)
class Run:
    """A training step of which two figures are published."""

    model: Fields
    axes: dict[str, int]
    batch: int
    micro_batch: int
    published: tuple[float, float]
    """Seconds of a step: baseline, HyperOffload."""
    assumed: str


RUNS = {
    "Llama-3-8B": Run(
        LLAMA_8B,
        {"shard": 8},
        24,
        3,
        (5.2, 4.08),
        "24 rows of 4,096 tokens, three on each device at once, shard 8, fp32 state, bf16 arithmetic",
    ),
    "DeepSeek-V3": Run(
        with_layers(DEEPSEEK_V3, 4),
        {"shard": 8, "expert": 8},
        8,
        1,
        (2.5, 2.19),
        "4 of 61 layers (one with all 256 experts), since 671B parameters do not fit eight devices; 8 rows of 4,096 "
        "tokens, one on each device, shard 8 · expert 8, fp32 state, bf16 arithmetic",
    ),
}


def predicted(run: Run) -> dict[str, Any]:
    """The rows of a run, simulated, beside what is published."""
    baseline, offloaded = run.published
    precision = {"param": "float32", "compute": "bfloat16", "reduce": "float32"}
    train = {"batch": run.batch, "micro_batch": run.micro_batch, "clip": 1.0}
    rows: list[dict[str, Any]] = []
    for (way, memory), published in zip(WAYS.items(), (baseline, None, offloaded), strict=True):
        strategy = {"axes": run.axes, "precision": precision, "memory": memory}
        file = run_file(run.model, sequence=4096, strategy=strategy, train=train)
        found = predict_run(from_dict(file), Cluster.named("cloudmatrix384x8"))
        rows.append(
            {
                "name": way,
                "peak": found.timeline.peak.bytes,
                "capacity": found.capacity,
                "simulated_s": found.timeline.step,
                "published_s": published,
                "notes": list(found.notes),
            }
        )
    return {
        "assumed": run.assumed,
        "rows": rows,
        "published_ratio": offloaded / baseline,
        "simulated_ratio": rows[-1]["simulated_s"] / rows[0]["simulated_s"],
    }
