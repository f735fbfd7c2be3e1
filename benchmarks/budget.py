"""Whether budgets hold: python benchmarks/budget.py [--cases N] [--workers 2]

Random cases of (model, rows, positions, budget, tiers). Of each, the step's graph is captured, planned within the
budget by `offload`, and run three times on real tensors and real tiers, beside the same step without a budget:

- live: the most that was alive at once, as an observer sees it that knows nothing of the graph or the plan: the bytes
  of every untyped storage that operators have seen, asked for anew after each operator;
- resident: the process's high-water mark over what it held before the state was allocated, less what the host tier
  reserved (which is declared, and touched before);
- bits: the gradients' norm and loss of each step and all state after the last are compared with the step without.

Budgets lie between the working set and the peak without a budget, and some below it. Those are met by another graph of
the same step (another order, or storages computed again), or refused before anything runs, with a floor at which the
same case runs with 1% more. The result is written as processes end, so that a run that is stopped keeps what it has.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import torch
from commandline import run
from memory import MODELS, collected
from pages import Benchmark
from processes import TRIMMED, fresh, scratch
from shapes import with_layers
from torch import Tensor, nn
from training import build, captured, graph_inputs, recipe_of, runtime_of, settled, silent_host, step_batch

from harness.observer import Observer, UnseenHost
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import registry
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph, executable
from hyper_parallel.offloading import OffloadTier, build_problem
from hyper_parallel.offloading.schedule.offload_pass import Planned, planned
from hyper_parallel.offloading.tiers import FlashTier, Tier, measure
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.capture_train_step import state
from hyper_parallel.step.recipe import Recipe

STEPS = 3
PER_PROCESS = 10
"""Cases that a process runs, after which a new one begins."""
SMALL = {"llama": 4, "gpt2": 4, "gemma": 4, "mixtral": 2, "qwen3-moe": 2, "deepseek-v3": 2, "llama, tied": 4}
"""The models, each with so many layers at most."""


def draw(seed: int) -> dict[str, Any]:
    chosen = random.Random(seed)
    model = chosen.choice(sorted(SMALL))
    return {
        "seed": seed,
        "model": model,
        "layers": chosen.randint(1, SMALL[model]),
        "rows": chosen.choice((1, 2, 4)),
        "positions": chosen.choice((64, 128, 256)),
        "share": chosen.choice((-0.05, *(chosen.uniform(0.0, 1.0) for _ in range(9)))),
        "tiers": chosen.choice((("host",), ("flash",), ("host", "flash"))),
    }


def made(case: Mapping[str, Any], values: str | None = None) -> nn.Module:
    return build(with_layers(MODELS[case["model"]], case["layers"]), values=values)


def batch(recipe: Recipe, case: Mapping[str, Any]) -> StepBatch:
    return step_batch(recipe, case["rows"], case["positions"], MODELS[case["model"]]["vocab_size"])


class Host:
    """A host that keeps what it is shown first at each point."""

    def __init__(self) -> None:
        self.shown: list[Tensor] = []

    def __call__(self, point: str, values: Sequence[Tensor]) -> Tensor | None:
        self.shown.append(values[0].clone())
        return silent_host(point, values)


def plain(case: Mapping[str, Any], step: StepGraph) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What the host is shown in each step, and all state after the last, without a budget."""
    recipe = recipe_of(made(case, "cpu"))
    tensors, host, graph = graph_inputs(recipe, batch(recipe, case)), Host(), executable(step)
    for _ in range(STEPS):
        graph.run(tensors, host)
    return host.shown, {name: tensors[name] for name in state(recipe.handle, recipe.optimizer)}


def under(case: Mapping[str, Any], found: Planned, tiers: Mapping[str, Tier]) -> dict[str, Any]:
    """The planned step, run and watched."""
    backend = registry.backend("cpu")
    runtime = runtime_of(found, tiers)
    graph, host = executable(found.step, cache=runtime), Host()
    collected()
    before = backend.memory_allocated()
    recipe, tensors = settled(lambda: recipe_of(made(case, "cpu")), partial(batch, case=case), runtime)
    with Observer(list(tensors.values())) as observer:
        graph.run(tensors, host)
    collected()
    backend.reset_memory_peak()
    for _ in range(STEPS - 1):
        graph.run(tensors, host)
    resident = backend.memory_peak() - before
    values = {}
    for name in state(recipe.handle, recipe.optimizer):
        with runtime.present(name, tensors[name]):
            values[name] = tensors[name].clone()
    about = {"live": observer.peak, "resident": resident, "moved": runtime.moved}
    return {**about, "shown": host.shown, "values": values}


def run_case(case: Mapping[str, Any]) -> dict[str, Any]:
    cluster, backend = Cluster.named("h100"), registry.backend("cpu")
    step = captured(made(case), case["rows"], case["positions"])
    free = build_problem(step, cluster, 2**50, ())
    peak, least = max(free.profile()), free.working_set
    budget = int(least + case["share"] * (peak - least))
    result: dict[str, Any] = {**case, "peak": peak, "working_set": least, "budget": budget}
    with scratch() as folder, contextlib.ExitStack() as stack:
        tiers: dict[str, Tier] = {}
        if "host" in case["tiers"]:
            # Beside flash it holds about half of what has to go somewhere.
            room = peak if len(case["tiers"]) == 1 else max(2**20, (peak - budget) // 2)
            tiers["host"] = stack.enter_context(UnseenHost(backend, room))
        if "flash" in case["tiers"]:
            tiers["flash"] = stack.enter_context(FlashTier(folder, backend))
        spaces = tuple(
            OffloadTier(name, tier.capacity, *measure(tier, backend)) for name, tier in tiers.items()
        )
        try:
            found = planned(step, cluster, budget, spaces)
        except BudgetError as error:
            result["refused"] = str(error)
            result["budget"] = budget = int(1.01 * least)
            found = planned(step, cluster, budget, spaces)
        shown, expected = plain(case, step)
        ran = under(case, found, tiers)
        told, values = ran.pop("shown"), ran.pop("values")
        same = len(shown) == len(told) and all(map(torch.equal, shown, told))
        same = same and all(torch.equal(expected[name], values[name]) for name in expected)
        return {**result, "predicted": found.plan.peak, "floor": found.plan.floor, **ran, "same": same}


def check(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a case."""
    wrong = []
    if row["live"] > row["budget"]:
        wrong.append(f"holds {row['live']} of {row['budget']}")
    if abs(row["live"] / row["predicted"] - 1) > 0.01:
        wrong.append(f"holds {row['live']}, predicted {row['predicted']}")
    if not row["same"]:
        wrong.append("other bits than without a budget")
    if row["share"] >= 0 and "refused" in row:
        wrong.append("refused above the working set")
    if row["floor"] > 1.01 * row["working_set"]:
        wrong.append(f"the floor is {row['floor']}, the working set {row['working_set']}")
    return wrong


def _group(seeds: range) -> list[dict[str, Any]]:
    """Cases one after the other; the first of them once before, which loads kernels."""
    run_case({**draw(seeds[0]), "layers": 1, "rows": 1, "positions": 32, "share": 0.5})
    return [run_case(draw(seed)) for seed in seeds]


def rows_of(seeds: range, workers: int) -> Iterator[dict[str, Any]]:
    """Each case. A process runs `PER_PROCESS` of them, and `workers` processes run at a time: what is live and what is
    resident are each process's own."""
    groups = [seeds[at : at + PER_PROCESS] for at in range(0, len(seeds), PER_PROCESS)]
    with ThreadPoolExecutor(workers) as pool:
        for rows in pool.map(lambda group: fresh(_group, group, **TRIMMED), groups):
            yield from rows


def summarized(rows: Sequence[Mapping[str, Any]], of: int) -> dict[str, Any]:
    """What so many cases of all that are to be run came to."""
    over = [row["resident"] / row["budget"] for row in rows]
    return {
        "cases": len(rows),
        "of": of,
        "refused": sum("refused" in row for row in rows),
        "met_below": sum(row["share"] < 0 and "refused" not in row for row in rows),
        "wrong": {row["seed"]: check(row) for row in rows if check(row)},
        "live_of_budget_at_most": max(row["live"] / row["budget"] for row in rows),
        "live_off_predicted_at_most": max(abs(row["live"] / row["predicted"] - 1) for row in rows),
        "resident_of_budget_median": statistics.median(over),
        "resident_of_budget_at_most": max(over),
        "resident_over_budget_bytes_at_most": max(row["resident"] - row["budget"] for row in rows),
    }


def page(kept: Mapping[str, Any]) -> Iterator[str]:
    summary = kept["summary"]
    count, wrong = summary["cases"], summary["wrong"]
    # Rounded down: what is below the whole is not shown as the whole.
    most = math.floor(1e6 * summary["live_of_budget_at_most"]) / 1e4
    if count < summary["of"]:
        yield f"So far {count} of {summary['of']} cases were run."
    yield (
        f"In {'all' if not wrong else count - len(wrong)} of {count} cases every bit of the state was the same; an "
        "observer independent of the plan saw at most the budget, and within 1% the predicted number of bytes."
    )
    if wrong:
        yield f"**Failed** seeds: {', '.join(map(str, wrong))}."
    yield (
        f"It saw at most {most:.4f}% of a budget, and differed from the prediction "
        f"by at most {100 * summary['live_off_predicted_at_most']:.3f}%. Among the budgets below the working set of "
        f"the captured step, {summary['refused']} were refused before the run (the same cases ran with 1% above it), "
        f"and {summary['met_below']} were met by another order of the same step."
    )
    yield ""
    yield (
        f"The process's resident memory grew by more than the tensors' bytes: to "
        f"{summary['resident_of_budget_median']:.1%} of the budget in the median, and to at most "
        f"{summary['resident_over_budget_bytes_at_most'] / 2**20:.0f} MiB more than the budget. The difference is "
        "memory that kernels allocate and free internally; leave room for it."
    )


BENCHMARK = Benchmark("budget", {"offload.md": page})


def main(cases: int = 200, workers: Annotated[int, "processes that run cases at the same time"] = 1) -> bool:
    """Run the cases, keep the result after each; whether a budget did not hold."""
    rows: list[dict[str, Any]] = []
    for row in rows_of(range(cases), workers):
        rows.append(row)
        print(row["seed"], row["model"], "+".join(row["tiers"]), *(check(row) or ["holds"]), flush=True)
        BENCHMARK.keep({"summary": summarized(rows, cases), "cases": rows})
    return any(map(check, rows))


if __name__ == "__main__":
    run(main)
