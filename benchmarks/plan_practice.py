"""The planner's first answer beside the strategy that a published recipe or guide gives, both estimated by one model.

    python benchmarks/plan_practice.py     # writes benchmarks/results/plan_practice.json and docs/plan-practice.md

The degrees and the micro-batch of practice are those of its source; what the source leaves open is filled in by a rule
(`FILLED`), with the settings that the planner estimates as the quickest. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from commandline import run
from pages import Benchmark, spaced, table

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner import format
from hyper_parallel.planner.constants import constants_for
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import search
from hyper_parallel.planner.solve import TIE, simplest
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload

LENGTH = 8192
BATCH = {8: 128, 64: 512, 512: 2048}
"""Sequences of a step, by devices."""

BRIDGE_LLAMA = "Megatron-Bridge, H100 recipes of Llama 3"
BRIDGE_QWEN = "Megatron-Bridge, H100 performance recipes of Qwen3 MoE"
BRIDGE_QWEN_8 = "Megatron-Bridge, H100 recipes of Qwen3 MoE"
CORE_MOE = "Megatron Core MoE, parallel mappings"
TITAN = "torchtitan, performance"
_DOCS = "https://docs.nvidia.com/nemo/megatron-bridge"
SOURCES = {
    BRIDGE_LLAMA: f"{_DOCS}/nightly/apidocs/bridge/bridge.perf_recipes.llama.h100.llama3.html",
    BRIDGE_QWEN: f"{_DOCS}/nightly/apidocs/bridge/bridge.perf_recipes.qwen.h100.qwen3_moe.html",
    BRIDGE_QWEN_8: f"{_DOCS}/latest/apidocs/bridge/bridge.recipes.qwen.h100.qwen3_moe.html",
    CORE_MOE: "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/README.md",
    TITAN: "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md",
}


@dataclass(frozen=True)
class Practice:
    """What a source says."""

    model: str
    devices: int
    source: str
    stated: str
    """The devices and degrees of the source; more devices take more data parallelism."""
    fix: Mapping[str, Any]


def _degrees(**stated: Any) -> dict[str, Any]:
    """All that a source's degrees fix; ranks beside them see different data."""
    return {**dict.fromkeys(("tensor_x", "pipeline", "context", "expert", "tensor_y", "micro"), 1), **stated}


LLAMA_8B = _degrees(context=2)
FSDP_8B = _degrees(recompute="selective", zero=3)
LLAMA_70B = _degrees(tensor_x=4, pipeline=4, context=2, schedule=("1f1b", "interleaved"))
FSDP_70B = _degrees(recompute="full", recomputed=1.0, zero=3)
MIXTRAL = _degrees(pipeline=4, expert=8, schedule=("1f1b", "interleaved"))
PRACTICE = (
    Practice("llama-3-8b", 8, BRIDGE_LLAMA, "8 H100: context 2", LLAMA_8B),
    Practice("llama-3-8b", 8, TITAN, "8 H100 of 96 GB: FSDP, selective recomputation", FSDP_8B),
    Practice("llama-3-8b", 64, BRIDGE_LLAMA, "64 H100: as on 8, a larger batch", LLAMA_8B),
    Practice("llama-3-8b", 64, TITAN, "8 to 128 H100: FSDP, selective recomputation", FSDP_8B),
    Practice("llama-3-8b", 512, BRIDGE_LLAMA, "64 H100: as on 8, a larger batch", LLAMA_8B),
    Practice("llama-3-70b", 8, TITAN, "64 A100: FSDP, full recomputation", FSDP_70B),
    Practice("llama-3-70b", 64, BRIDGE_LLAMA, "64 H100: tensor 4, pipeline 4, context 2", LLAMA_70B),
    Practice("llama-3-70b", 64, TITAN, "64 A100: FSDP, full recomputation", FSDP_70B),
    Practice("llama-3-70b", 512, BRIDGE_LLAMA, "64 H100: tensor 4, pipeline 4, context 2", LLAMA_70B),
    Practice("mixtral-8x7b", 8, CORE_MOE, "guide: expert 8, tensor 1 within a node", _degrees(expert=8)),
    Practice("mixtral-8x7b", 64, CORE_MOE, "64 H100: pipeline 4, expert 8, tensor 1", MIXTRAL),
    Practice("mixtral-8x7b", 512, CORE_MOE, "64 H100: pipeline 4, expert 8, tensor 1", MIXTRAL),
    Practice(
        "qwen3-30b-a3b", 8, BRIDGE_QWEN_8, "8 H100: tensor 4, pipeline 2, expert 4",
        _degrees(tensor_x=4, pipeline=2, expert=4, schedule=("1f1b", "interleaved")),
    ),
    Practice("qwen3-30b-a3b", 64, BRIDGE_QWEN, "16 H100: expert 16; 64: a larger batch", _degrees(expert=16)),
    Practice("qwen3-30b-a3b", 512, BRIDGE_QWEN, "16 H100: expert 16; 64: a larger batch", _degrees(expert=16)),
)  # fmt: skip

FILLED = ("state_on_host", "activations_on_host", "weights_on_host")
"""Practice has nothing on the host where it fits without."""


def told(own: Figures) -> dict[str, Any]:
    """A strategy with its estimate, as plain data."""
    return {
        "axes": format.axes(own.strategy),
        "settings": format.settings(own.strategy),
        "seconds": own.seconds,
        "between": list(own.between),
        "peak": own.peak,
        "on_host": own.on_host,
    }


def one(practice: Practice) -> dict[str, Any]:
    """Both strategies of a case."""
    asked = Question(
        workload=Workload(shape(practice.model), BATCH[practice.devices], LENGTH),
        cluster=Cluster.named(f"h100x{practice.devices}"),
        tie=TIE,
    )
    constants = constants_for(asked.profile, asked.cluster)
    fixed = replace(asked, tie=0.0, top=1, fix=practice.fix)
    stays = replace(fixed, fix={**practice.fix, **dict.fromkeys(FILLED, 0.0)})
    theirs = search(stays, constants).best or search(fixed, constants).best
    return {
        "model": practice.model,
        "devices": practice.devices,
        "batch": BATCH[practice.devices],
        "source": practice.source,
        "stated": practice.stated,
        "planner": told(simplest(asked, constants).best[0]),
        "practice": told(theirs[0]) if theirs else None,
    }


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The tables of docs/plan-practice.md."""
    rows, differences = result["rows"], [_differences(row) for row in result["rows"]]
    ratios = [of_row[0] for of_row in differences if of_row]
    apart = [ratio for ratio in ratios if abs(ratio) > result["tie"]]
    shorter = sum(ratio <= 0 for ratio in apart)
    return spaced(
        table(
            "Model, devices | Planner's first answer | Practice | Planner's step | Practice's step | Difference | Its "
            "interval",
            map(_line, rows, differences),
            "lllrrrr",
        ),
        f"Of {len(rows)} choices of practice {len(ratios) - len(apart)} tie with the planner's first answer "
        f"(within {result['tie']:.0%}), {shorter} are estimated shorter, {len(apart) - shorter} longer, and "
        f"{len(rows) - len(ratios)} fit no device; {sum(abs(ratio) <= 0.15 for ratio in ratios)} are within 15%, which "
        "the cost model does not order reliably. All figures are estimated.",
        (f"{_number(name)}. [{name}]({address})" for name, address in SOURCES.items()),
    )


def _differences(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Practice's step over the planner's, less 1, and between what; nothing where it does not fit."""
    ours, theirs = row["planner"], row["practice"]
    if theirs is None:
        return ()
    (low, high), (least, most) = theirs["between"], ours["between"]
    return theirs["seconds"] / ours["seconds"] - 1, low / most - 1, high / least - 1


def _line(row: Mapping[str, Any], differences: tuple[float, ...]) -> str:
    ours, theirs = row["planner"], row["practice"]
    stated = f"{row['stated']} [{_number(row['source'])}]"
    begun = f"| {row['model']}, {row['devices']} | {_strategy(ours)} | {stated}"
    if not differences:
        return f"{begun} | {ours['seconds']:.3g} s | does not fit | | |"
    ratio, low, high = (f"{share:+.1%}".replace("-", "−") for share in differences)
    times = f"{ours['seconds']:.3g} s | {theirs['seconds']:.3g} s"
    return f"{begun}: {_strategy(theirs)} | {times} | {ratio} | {low} to {high} |"


def _number(source: str) -> int:
    return list(SOURCES).index(source) + 1


def _strategy(told: Mapping[str, Any]) -> str:
    return f"`{told['axes']}` ({told['settings']})"


BENCHMARK = Benchmark("plan_practice", {"plan-practice.md": lines})


def main() -> None:
    """Every case."""
    rows = []
    for practice in PRACTICE:
        row = one(practice)
        print(practice.model, practice.devices, row["planner"]["axes"], "|", row["practice"], flush=True)
        rows.append(row)
    BENCHMARK.keep({"tie": TIE, "rows": rows})


if __name__ == "__main__":
    run(main)
