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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from commandline import run
from pages import Benchmark, spaced, table

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import code
from hyper_parallel.planner.constants import fitted
from hyper_parallel.planner.cost_model.step import Estimate, estimate
from hyper_parallel.planner.framework_profiles import profile
from hyper_parallel.planner.metrics import figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import search
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


INTERLEAVED = {"schedule": code("schedule", "interleaved")}
RUNS = (
    Published(
        *("llama-3-405b", "h100", 16384, 2048, 8192, "bf16", "meta-llama-3"),
        {"tensor_x": 8, "pipeline": 16, "shard": 128, "zero": 2, "virtual": 8, "sequence_parallel": 1}
        | INTERLEAVED,
        158.0,
        "arXiv 2407.21783, table 4: TP 8, PP 16, DP 128, 400 TFLOP/s a device (model FLOPs with all of attention)",
    ),
    Published(
        *("deepseek-v3", "h800", 2048, 15360, 4096, "fp8", "hai-llm"),
        {"pipeline": 16, "shard": 128, "zero": 1, "expert": 64, "schedule": code("schedule", "dualpipe")},
        1543.0,
        "arXiv 2412.19437, table 1: 180 K H800 hours for 10¹² tokens; PP 16, EP 64, ZeRO-1, DualPipe",
    ),
    Published(
        *("megatron-1t", "a100", 3072, 3072, 2048, "fp16", "megatron-lm"),
        {"tensor_x": 8, "pipeline": 64, "replicate": 6, "virtual": 2, "recompute": code("recompute", "full")}
        | INTERLEAVED,
        19.95,
        "arXiv 2104.04473, table 1: TP 8, PP 64, 163 TFLOP/s a device by its formula; attention was not fused then",
    ),
    Published(
        *("pangu-ultra-135b", "910b", 8192, 4096, 8192, "bf16", "mindspeed-llm"),
        {"tensor_x": 8, "pipeline": 8, "shard": 128, "zero": 1, "virtual": 6, "sequence_parallel": 1}
        | INTERLEAVED,
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
DEGREES = ("replicate", "shard", "context", "tensor_x", "tensor_y", "pipeline", "expert", "micro", "virtual")
"""What is told of a strategy where it is not 1."""


def best(**asked: Any) -> dict[str, Any]:
    """The best strategy that the planner finds, and its estimate."""
    return search(Question(top=1, **asked), fitted()).best[0].to_json()


def _told(table: Table, estimated: Estimate) -> dict[str, Any]:
    return figures(table, estimated)[0].to_json()


def theirs(team: Published) -> dict[str, Any]:
    """The estimates for a published strategy and for the best one that the planner finds."""
    work = Workload(shape(team.model), team.batch, team.sequence, team.precision)
    cluster, facts = Cluster.named(f"{team.cluster}x{team.devices}"), profile(team.framework)
    table = Table.of(work, cluster, facts, **team.spread, devices=team.devices)
    asked = {"workload": work, "cluster": cluster, "profile": facts}
    return {
        "model": team.model,
        "cluster": team.cluster,
        "devices": team.devices,
        "source": team.source,
        "published": team.tokens,
        "theirs": _told(table, estimate(table, fitted())),
        "ours": best(**asked),
        "ours_on_the_device": best(**asked, fix={"state_on_host": 0, "activations_on_host": 0}),
    }


def dimensions(model: str, sequence: int, cluster: str) -> dict[str, Any]:
    """The best strategy of one of Hypertron's models without, and with, its dimensions."""
    work, where = Workload(shape(model), DEVICES, sequence), Cluster.named(f"{cluster}x{DEVICES}")
    found = {name: best(workload=work, cluster=where, fix=fix) for name, fix in DIMENSIONS.items()}
    return {"model": model, "cluster": cluster, "sequence": sequence, "best": found}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The tables of docs/plan-published.md."""
    return spaced(
        "Tokens/s per device. All figures except the published ones are estimated, with their 90% interval.",
        table(
            "Run | published | theirs | ours | ours without the host | ours is", map(_of_team, result["runs"])
        ),
        "The strategies of that table:",
        (line for one in result["runs"] for line in _strategies(one)),
        table(
            "Model on 2,048 devices | neither | split of the sequence | and 2D tensor | all is | best with all",
            map(_of_dimensions, result["hypertron"]),
        ),
    )


def _of_team(one: Mapping[str, Any]) -> tuple[str, ...]:
    published = f"{one['published']:,.0f}" if one["published"] else "not stated"
    cells = (_cell(one[name]) for name in ("theirs", "ours", "ours_on_the_device"))
    gain = one["theirs"]["step_time_s"] / one["ours"]["step_time_s"]
    return f"{one['model']}, {one['devices']:,} × {one['cluster']}", published, *cells, f"{gain:.2f} ×"


def _strategies(one: Mapping[str, Any]) -> Iterator[str]:
    yield f"- {one['model']} ({one['source']}). Theirs: {_spread(one['theirs'])}. Ours: {_spread(one['ours'])}. "
    yield f"  Without the host: {_spread(one['ours_on_the_device'])}."


def _of_dimensions(one: Mapping[str, Any]) -> tuple[str, ...]:
    best = one["best"]
    cells = (f"{best[name]['step_time_s']:.2f} s, MFU {best[name]['mfu']:.1%}" for name in DIMENSIONS)
    gain = best["neither"]["step_time_s"] / best["2D tensor"]["step_time_s"]
    return f"{one['model']}, {one['cluster']}", *cells, f"{gain:.2f} ×", _spread(best["2D tensor"])


def _cell(one: Mapping[str, Any]) -> str:
    fits = "" if one["fits"] else ", does not fit"
    speed = one["tokens_per_s_per_device"]
    low, high = (speed * one["step_time_s"] / seconds for seconds in reversed(one["interval_s"]))
    return f"{speed:,.0f} ({low:,.0f}–{high:,.0f}), MFU {one['mfu']:.1%}{fits}"


def _spread(one: Mapping[str, Any]) -> str:
    told = [f"{name} {value:g}" for name, value in one["strategy"].items() if name in DEGREES and value != 1]
    again = one["strategy"]["recompute"]
    told += [f"ZeRO-{one['strategy']['zero']:g}"] if one["strategy"]["zero"] else []
    told += [f"recompute {again} {one['strategy']['recomputed']:.0%}"] if again != "none" else []
    moved = {name: one["strategy"][f"{name}_on_host"] for name in ("state", "activations")}
    told += [f"{share:.0%} of {name} on the host" for name, share in moved.items() if share]
    return ", ".join(told)


BENCHMARK = Benchmark("plan_published", {"plan-published.md": lines})


def main() -> None:
    """Both tables."""
    result = {
        "runs": [theirs(team) for team in RUNS],
        "hypertron": [
            dimensions(model, sequence, cluster)
            for model, sequence in HYPERTRON
            for cluster in ("h100", "cloudmatrix384")
        ],
    }
    BENCHMARK.keep(result)


if __name__ == "__main__":
    run(main)
