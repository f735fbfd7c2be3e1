"""The planner's answer beside the strategy that a published recipe or guide gives, both simulated with our kernels.

    python benchmarks/plan_practice.py     # writes benchmarks/results/plan_practice.json and docs/plan-practice.md

Both are answers of `planner.refine.solved` to one question of what `train` runs; that of practice has the degrees and
the micro-batch of its source fixed, and what the source leaves open is the planner's choice there too. The figures are
those of `hyper-parallel simulate`; nothing is measured. A case takes minutes; those that are there are not asked again
(`--again`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from campaigns import Rows, limited
from commandline import Again, run
from pages import Benchmark, spaced, table

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.planner import format
from hyper_parallel.planner.framework_profiles import HYPER_PARALLEL
from hyper_parallel.planner.metrics import simulated_classes
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.refine import solved
from hyper_parallel.planner.solve import TIE, Solved
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

LIMIT = 1800
"""Seconds of an answer."""
Row = Mapping[str, Any]


def figures_of(found: Solved) -> Row:
    """A strategy with its figures, as plain data."""
    shown, prediction = found.shown, found.prediction
    return {
        "axes": format.axes(shown.strategy),
        "settings": format.settings(shown.strategy),
        "seconds": shown.seconds,
        "peak": shown.peak,
        "on_host": shown.on_host,
        "parts": dict(simulated_classes(prediction.parts)) if prediction else {},
        "reason": "" if prediction else found.simulated[0].reason if found.simulated else "not simulated",
    }


def answered(question: Question) -> Row:
    """The answer to a question, or why there is none."""
    try:
        with limited(LIMIT):
            return figures_of(solved(question))
    except (HyperParallelError, TimeoutError) as error:
        return {"error": str(error).splitlines()[0]}


def question_of(practice: Practice) -> Question:
    """What the planner is asked; practice fixes more of it."""
    return Question(
        workload=Workload(shape(practice.model), BATCH[practice.devices], LENGTH),
        cluster=Cluster.named(f"h100x{practice.devices}"),
        profile=HYPER_PARALLEL,
        runnable=True,
        tie=TIE,
    )


def name_of(practice: Practice) -> str:
    """A case by its name."""
    return f"{practice.model}, {practice.devices}: {practice.stated}"


def lines(result: Row) -> Iterator[str]:
    """The tables of docs/plan-practice.md."""
    cases = result["cases"]
    rows = [cases[name] for name in map(name_of, PRACTICE) if name in cases]
    ratios = [ratio for row in rows if (ratio := _ratio(row)) is not None]
    shorter = sum(ratio > TIE for ratio in ratios)
    ties = sum(abs(ratio) <= TIE for ratio in ratios)
    at_most = sum(ratio >= 0 for ratio in ratios)
    return spaced(
        table(
            "Model, devices | Planner's answer | Practice | Planner's step | Practice's step | Difference | Mostly of",
            map(_line, rows),
            "lllrrrl",
        ),
        f"Of {len(rows)} choices of practice, {len(PRACTICE) - len(rows)} more being left, the planner's answer is at "
        f"most as long as {at_most}. Within {TIE:.0%} of it are {ties}, longer by more {shorter}, shorter by more "
        f"{len(ratios) - shorter - ties}; {len(rows) - len(ratios)} have no simulated step. All figures are simulated.",
        (f"{_number(name)}. [{name}]({address})" for name, address in SOURCES.items()),
    )


def _ratio(row: Row) -> float | None:
    """Practice's step over the planner's, less 1; None where one of them was not simulated."""
    ours, theirs = row["planner"], row["practice"]
    if not ours.get("parts") or not theirs.get("parts"):
        return None
    return float(theirs["seconds"] / ours["seconds"] - 1)


def _why(row: Row, ratio: float) -> str:
    """The class of a step's seconds that most of a difference comes from, in the direction of the difference."""
    ours, theirs = row["planner"]["parts"], row["practice"]["parts"]
    if row["planner"]["axes"] == row["practice"]["axes"] and ratio == 0:
        return "the same strategy"
    sign = 1.0 if ratio >= 0 else -1.0
    names = sorted({*ours, *theirs})
    most = max(names, key=lambda name: sign * (theirs.get(name, 0.0) - ours.get(name, 0.0)))
    return f"{most}: {theirs.get(most, 0.0):.3g} s in place of {ours.get(most, 0.0):.3g} s"


def _line(row: Row) -> str:
    ours, theirs, ratio = row["planner"], row["practice"], _ratio(row)
    stated = f"{row['stated']} [{_number(row['source'])}]"
    begun = f"| {row['model']}, {row['devices']} | {_strategy(ours)} | {stated}: {_strategy(theirs)}"
    if ratio is None:
        reason = ours.get("error") or theirs.get("error") or ours.get("reason") or theirs.get("reason")
        return f"{begun} | {_seconds(ours)} | {_seconds(theirs)} | | {reason} |"
    share = f"{ratio:+.1%}".replace("-", "−")
    return f"{begun} | {_seconds(ours)} | {_seconds(theirs)} | {share} | {_why(row, ratio)} |"


def _seconds(one: Row) -> str:
    return f"{one['seconds']:.3g} s" if one.get("parts") else ""


def _number(source: str) -> int:
    return list(SOURCES).index(source) + 1


def _strategy(one: Row) -> str:
    return f"`{one['axes']}` ({one['settings']})" if "axes" in one else "no answer"


BENCHMARK = Benchmark("plan_practice", {"plan-practice.md": lines})


def main(only: Annotated[str, "cases whose name contains this"] = "", again: Again = False) -> None:
    """Ask what has not been asked yet."""
    result = Rows(BENCHMARK, again and not only)
    cases = {name_of(practice): practice for practice in PRACTICE}
    ours: dict[tuple[str, int], Row] = {
        (row["model"], row["devices"]): row["planner"] for row in result.rows.values() if not again
    }
    for name in result.missing(cases, only, again):
        practice = cases[name]
        question, key = question_of(practice), (practice.model, practice.devices)
        if key not in ours:
            ours[key] = answered(question)
        theirs = answered(replace(question, tie=0.0, fix=practice.fix))
        row = {
            "model": practice.model,
            "devices": practice.devices,
            "batch": BATCH[practice.devices],
            "source": practice.source,
            "stated": practice.stated,
            "planner": ours[key],
            "practice": theirs,
        }
        print(_line(row), flush=True)
        result.add(name, row)


if __name__ == "__main__":
    run(main)
