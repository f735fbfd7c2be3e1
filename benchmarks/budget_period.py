"""Budgets on a period of layers: python benchmarks/budget_period.py

Each case is `simulate` of a run with a memory budget, planned twice: with the search on few of the layers
(`StepGraph.short`) and on all of them. For both: step and peak as they are predicted, and processor and wall-clock
seconds until then. The headlines are planned on few layers alone. The budget is a share of what the step holds without
one.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from unittest import mock

from campaigns import Rows, one_line
from commandline import Again, run
from pages import Benchmark, table

from hyper_parallel import config
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import BudgetError
from hyper_parallel.estimate import predict
from hyper_parallel.estimate.predict import cluster_of, predict_run
from hyper_parallel.offloading.pass_pipeline import described_offload
from hyper_parallel.offloading.schedule.equal_graphs import EqualGraphs
from hyper_parallel.offloading.schedule.offload_pass import Offload
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.transformers_config import to_config

GiB = 2**30
PRECISION = {"param": "float32", "compute": "bfloat16", "reduce": "float32"}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A question."""

    model: str
    ranks: int
    micro_batches: int
    share: float
    """The budget, of the peak without one."""
    axes: Mapping[str, int] | None = None
    sequence: int = 8192

    def __str__(self) -> str:
        return f"{self.model} on {self.ranks}, {self.micro_batches} × {self.sequence}, {self.share:.0%}"

    def file(self, budget: int | None) -> RunConfig:
        """The run within so many bytes a device."""
        axes = dict(self.axes or {"shard": self.ranks})
        rows = self.micro_batches * axes.get("shard", 1) * axes.get("replicate", 1)
        memory: dict[str, Any] = {"shard": "parameters"}
        if budget is not None:
            memory |= {"device": budget, "host": 160 * GiB}
        return config.from_dict(
            {
                "version": 1,
                "out": "runs/budget",
                "model": {"config": to_config(shape(self.model), self.sequence)},
                "data": {"train": "python-stdlib", "sequence": self.sequence},
                "train": {"batch": rows, "micro_batch": 1, "engine": "graph", "graph_cache": False},
                "strategy": {"axes": axes, "memory": memory, "precision": PRECISION},
            },
            source="benchmarks/budget_period.py",
        )


EXPERTS = {"shard": 8, "expert": 8}
CASES = (
    Case("qwen-3-1.7b", 8, 2, 0.6),
    Case("llama-3-8b", 8, 2, 0.5),
    Case("llama-3-8b", 8, 2, 0.65),
    Case("llama-3-8b", 16, 2, 0.8),
    Case("qwen-3-8b", 8, 2, 0.5),
    Case("qwen-3-8b", 8, 2, 0.7),
    Case("qwen-3-14b", 8, 2, 0.6),
    Case("qwen-3-14b", 16, 2, 0.8),
    Case("llama-3-70b", 64, 2, 0.6, sequence=4096),
    Case("mixtral-8x7b", 16, 2, 0.6),
    Case("mixtral-8x7b", 64, 2, 0.8, EXPERTS),
    Case("qwen-3-30b-a3b", 32, 2, 0.7),
)
HEADLINES = {
    "14B on 8": (Case("qwen-3-14b", 8, 4, 0.5), 30),
    "70B on 64": (Case("llama-3-70b", 64, 2, 0.26), 60),
}
"""And the seconds that they may take."""


def simulated(case: Case, budget: int | None, all_layers: bool = False) -> dict[str, Any]:
    """Step and peak of a run, and the seconds that it took to say so."""
    file = case.file(budget)
    passes: list[Offload] = []

    def kept(*arguments: Any) -> Offload | None:
        offload = described_offload(*arguments)
        passes.extend([] if offload is None else [offload])
        return offload

    began, used = time.perf_counter(), time.process_time()
    searched = mock.patch.object(EqualGraphs, "settings_of_few_layers", return_value=None)
    with (
        mock.patch.object(predict, "described_offload", kept),
        searched if all_layers else contextlib.nullcontext(),
    ):
        try:
            found = predict_run(file, cluster_of(f"h100x{case.ranks}", file))
        except BudgetError as error:
            return {"error": one_line(error)}
    row = {
        "step_s": found.timeline.step,
        "peak_bytes": found.timeline.peak.bytes,
        "processor_s": time.process_time() - used,
        "wall_s": time.perf_counter() - began,
    }
    if budget is None:
        return row
    (offload,) = passes
    (plan,) = offload.found
    return {**row, "planned_s": plan.plan.seconds, "plan": str(plan)}


def compared(case: Case) -> Row:
    """Both plans of a case."""
    free = simulated(case, None)
    budget = int(case.share * free["peak_bytes"])
    few, every = simulated(case, budget), simulated(case, budget, all_layers=True)
    row = {"free": free, "budget_bytes": budget, "few_layers": few, "all_layers": every}
    if "error" in few or "error" in every:
        return row
    return {
        **row,
        "step": few["step_s"] / every["step_s"] - 1,
        "planned": few["planned_s"] / every["planned_s"] - 1,
        "peak": few["peak_bytes"] / every["peak_bytes"] - 1,
    }


def summary(rows: Mapping[str, Row]) -> dict[str, Any]:
    """How far the plans on few layers are off, of all cases in which both were found."""
    both = [row for row in rows.values() if "step" in row]
    if not both:
        return {}
    return {
        "compared": len(both),
        "slower_by_at_most": max(row["step"] for row in both),
        "slower_by_median": statistics.median(row["step"] for row in both),
        "planned_slower_by_at_most": max(row["planned"] for row in both),
        "within_1_percent": sum(max(row["step"], row["planned"], row["peak"]) <= 0.01 for row in both),
        "more_memory_by_at_most": max(row["peak"] for row in both),
        "times_as_quick": statistics.median(
            row["all_layers"]["processor_s"] / row["few_layers"]["processor_s"] for row in both
        ),
    }


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/offload-schedule.md."""
    yield (
        "The step of the plan that was searched on few layers; by how much it is longer than that of one searched on "
        "all, as planned and as simulated, and its peak likewise; processor seconds of `simulate` from the file to the "
        "result with each (`benchmarks/budget_period.py`, H100, host 160 GiB a rank; micro-batches × tokens, budget):"
    )
    yield ""
    rows = []
    for name, row in result["cases"].items():
        few, every = row["few_layers"], row.get("all_layers")
        away = (
            ("", "", "", "")
            if every is None
            else (
                f"{row['planned']:+.1%}",
                f"{row['step']:+.1%}",
                f"{row['peak']:+.1%}",
                f"{every['processor_s']:.0f} s",
            )
        )
        rows.append((name, f"{few['step_s']:.2f} s", *away[:3], f"{few['processor_s']:.0f} s", away[3]))
    header = "Case | step | as planned | as simulated | peak | few layers in | all layers in"
    yield from table(header, rows, "lrrrrrr")


BENCHMARK = Benchmark("budget_period", pages={"offload-schedule.md": page})


def main(only: Annotated[str, "cases whose name contains this"] = "", again: Again = False) -> None:
    """Ask what has not been asked yet."""
    result = Rows(BENCHMARK, summary=summary)
    cases = {str(case): case for case in CASES}
    for name in result.missing(cases, only, again):
        result.add(name, compared(cases[name]))
        print(name, result.rows[name], flush=True)
    for name in result.missing(HEADLINES, only, again):
        case, limit = HEADLINES[name]
        free = simulated(case, None)
        budget = int(case.share * free["peak_bytes"])
        row = {"free": free, "budget_bytes": budget, "limit_s": limit, "few_layers": simulated(case, budget)}
        result.add(name, row)
        print(name, row, flush=True)


if __name__ == "__main__":
    run(main)
