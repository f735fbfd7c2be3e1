"""Published hand-tuned strategies beside the planner's, and what more dimensions give.

    python benchmarks/plan_published.py

1. The strategies that four teams published for their largest runs, estimated by the planner's model, beside the best
   that the planner finds for the same model, devices, batch and framework. Only the published figure is measured.
2. What 2D tensor parallelism and the split of the sequence give on 2,048 devices, for the two models of Hypertron (SC
   2025), which reports 1.33 × over the best strategy of other frameworks: the best strategy without them, and with.

Everything but the published figures is estimated. It trains nothing and takes minutes; benchmarks/results/
plan_published.json and a part of docs/plan-published.md are written from the outcome.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from measure import write
from pages import DOCS, put

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.codes import code
from hyper_parallel.planner.constants import fitted
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.framework_profiles import profile
from hyper_parallel.planner.metrics import figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import answer
from hyper_parallel.planner.table import Table
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Precision, Workload

DEVICES = 2048


@dataclass(frozen=True)
class Published:
    """A run that a team tuned by hand."""

    model: str
    cluster: str
    devices: int
    batch: int
    sequence: int
    precision: Precision
    framework: str
    spread: Mapping[str, float]
    tokens: float
    """Tokens/s of a device, as published or by arithmetic from what is."""
    source: str


RUNS = (
    Published(
        "llama-3-405b",
        "h100",
        16384,
        2048,
        8192,
        "bf16",
        "meta-llama-3",
        {
            "tensor_x": 8,
            "pipeline": 16,
            "shard": 128,
            "zero": 2,
            "virtual": 8,
            "schedule": code("schedule", "interleaved"),
            "sequence_parallel": 1,
        },
        158.0,
        "arXiv 2407.21783, table 4: TP 8, PP 16, DP 128, 400 TFLOP/s a device (model FLOPs with all of attention)",
    ),
    Published(
        "deepseek-v3",
        "h800",
        2048,
        15360,
        4096,
        "fp8",
        "hai-llm",
        {
            "pipeline": 16,
            "shard": 128,
            "zero": 1,
            "expert": 64,
            "schedule": code("schedule", "dualpipe"),
        },
        1543.0,
        "arXiv 2412.19437, table 1: 180 K H800 hours for 10¹² tokens; PP 16, EP 64, ZeRO-1, DualPipe",
    ),
    Published(
        "megatron-1t",
        "a100",
        3072,
        3072,
        2048,
        "fp16",
        "megatron-lm",
        {
            "tensor_x": 8,
            "pipeline": 64,
            "replicate": 6,
            "virtual": 2,
            "schedule": code("schedule", "interleaved"),
            "recompute": code("recompute", "full"),
        },
        19.95,
        "arXiv 2104.04473, table 1: TP 8, PP 64, 163 TFLOP/s a device by its formula; attention was not fused then",
    ),
    Published(
        "pangu-ultra-135b",
        "910b",
        8192,
        4096,
        8192,
        "bf16",
        "mindspeed-llm",
        {
            "tensor_x": 8,
            "pipeline": 8,
            "shard": 128,
            "zero": 1,
            "virtual": 6,
            "schedule": code("schedule", "interleaved"),
            "sequence_parallel": 1,
        },
        0.0,
        "arXiv 2504.07866, section 4: TP 8, PP 8 interleaved, DP 128, ZeRO; MFU above 50%; batch and length assumed",
    ),
)

HYPERTRON = (("hypertron-310b", 4096), ("hypertron-141b", 8192))
DIMENSIONS: Mapping[str, Mapping[str, Any]] = {
    "neither": {"tensor_y": 1, "sequence_parallel": 0},
    "sequence": {"tensor_y": 1},
    "2D tensor": {},
}
"""What may be used, by name; each has what those before it have."""


def theirs(run: Published) -> dict[str, Any]:
    """The estimates for a published strategy and for the best one that the planner finds."""
    work = Workload(shape(run.model), run.batch, run.sequence, run.precision)
    cluster, facts = Cluster.named(f"{run.cluster}x{run.devices}"), profile(run.framework)
    table = Table.of(work, cluster, facts, **run.spread, devices=run.devices)
    (hand,) = figures(table, estimate(table, fitted()))
    found = answer(Question(workload=work, cluster=cluster, profile=facts, top=1), fitted())
    (best,) = figures(found.best[0].table, found.best[0].estimate)
    kept = answer(
        Question(
            workload=work,
            cluster=cluster,
            profile=facts,
            top=1,
            fix={"state_on_host": 0, "activations_on_host": 0},
        ),
        fitted(),
    )
    (without,) = figures(kept.best[0].table, kept.best[0].estimate)
    return {
        "model": run.model,
        "cluster": run.cluster,
        "devices": run.devices,
        "source": run.source,
        "published": run.tokens,
        "theirs": hand.to_json(),
        "ours": best.to_json(),
        "ours_on_the_device": without.to_json(),
    }


def dimensions(model: str, sequence: int, cluster: str) -> dict[str, Any]:
    """The best strategy of one of Hypertron's models without, and with, its dimensions."""
    work = Workload(shape(model), DEVICES, sequence)
    found = {}
    for name, fix in DIMENSIONS.items():
        asked = Question(workload=work, cluster=Cluster.named(f"{cluster}x{DEVICES}"), top=1, fix=fix)
        best = answer(asked, fitted()).best[0]
        (found[name],) = (one.to_json() for one in figures(best.table, best.estimate))
    return {"model": model, "cluster": cluster, "sequence": sequence, "best": found}


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print-only", action="store_true", help="write nothing")
    given = parser.parse_args()
    result = {
        "runs": [theirs(run) for run in RUNS],
        "hypertron": [
            dimensions(model, sequence, cluster)
            for model, sequence in HYPERTRON
            for cluster in ("h100", "cloudmatrix384")
        ],
    }
    print("\n".join(lines(result)))
    if not given.print_only:
        write("plan_published", result)
        put(DOCS / "plan-published.md", "plan_published.py", lines(result))


def lines(result: Mapping[str, Any]) -> Iterable[str]:
    """The tables of docs/plan-published.md."""
    yield "Tokens/s per device. All figures except the published ones are estimated, with their 90% interval."
    yield ""
    yield "| Run | published | theirs | ours | ours without the host | ours is |"
    yield "|---|---|---|---|---|---|"
    for run in result["runs"]:
        published = f"{run['published']:,.0f}" if run["published"] else "not stated"
        cells = [_cell(run[name]) for name in ("theirs", "ours", "ours_on_the_device")]
        gain = run["theirs"]["step_time_s"] / run["ours"]["step_time_s"]
        who = f"{run['model']}, {run['devices']:,} × {run['cluster']}"
        yield f"| {who} | {published} | {' | '.join(cells)} | {gain:.2f} × |"
    yield ""
    yield "The strategies of that table:"
    yield ""
    for run in result["runs"]:
        yield f"- {run['model']} ({run['source']}). Theirs: {_spread(run['theirs'])}. Ours: {_spread(run['ours'])}. "
        yield f"  Without the host: {_spread(run['ours_on_the_device'])}."
    yield ""
    yield "| Model on 2,048 devices | neither | split of the sequence | and 2D tensor | all is | best with all |"
    yield "|---|---|---|---|---|---|"
    for one in result["hypertron"]:
        best = one["best"]
        cells = [f"{best[name]['step_time_s']:.2f} s, MFU {best[name]['mfu']:.1%}" for name in DIMENSIONS]
        gain = best["neither"]["step_time_s"] / best["2D tensor"]["step_time_s"]
        who = f"{one['model']}, {one['cluster']}"
        yield f"| {who} | {' | '.join(cells)} | {gain:.2f} × | {_spread(best['2D tensor'])} |"


def _cell(one: Mapping[str, Any]) -> str:
    fits = "" if one["fits"] else ", does not fit"
    speed = one["tokens_per_s_per_device"]
    low, high = (speed * one["step_time_s"] / seconds for seconds in reversed(one["interval_s"]))
    return f"{speed:,.0f} ({low:,.0f}–{high:,.0f}), MFU {one['mfu']:.1%}{fits}"


def _spread(one: Mapping[str, Any]) -> str:
    plain = {
        "replicate",
        "shard",
        "context",
        "tensor_x",
        "tensor_y",
        "pipeline",
        "expert",
        "micro",
        "virtual",
    }
    told = [f"{name} {value:g}" for name, value in one["strategy"].items() if name in plain and value != 1]
    again = one["strategy"]["recompute"]
    told += [f"ZeRO-{one['strategy']['zero']:g}"] if one["strategy"]["zero"] else []
    told += [f"recompute {again} {one['strategy']['recomputed']:.0%}"] if again != "none" else []
    moved = {name: one["strategy"][f"{name}_on_host"] for name in ("state", "activations")}
    told += [f"{share:.0%} of {name} on the host" for name, share in moved.items() if share]
    return ", ".join(told)


if __name__ == "__main__":
    main()
