"""What each kind of change to a step's graph gains under a budget: python benchmarks/offload_choices.py [--workers 2]

The step of `llama_8b.py` (a Llama of 8B's shape on one H100, alone on its host), links to the host of 25 and 50 GiB/s
each way, three budgets. Each case is planned with copies alone; with updates on the host as well; with recomputation
and another order; with all of them. Written down are the seconds of a step that the planner foresees, and those of a
processor that planning took. The result and the pages that show it are written after each plan: a run that is stopped
keeps what it has.

Nothing here ran on such a machine: times are those of the planner's clock, simulated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from multiprocessing import get_context
from typing import Any

import llama_8b
from measure import write
from offload_choices_pages import AGAIN, ALL, COPIES, UPDATES, again, updates
from pages import DOCS, put

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.host_update import is_update
from hyper_parallel.offloading import OffloadTier, Rate, build_problem
from hyper_parallel.offloading.schedule.allowed_rewrites import Choices
from hyper_parallel.offloading.schedule.offload_pass import planned
from hyper_parallel.offloading.schedule.problem import Problem

LINKS = (25, 50)
"""GiB/s each way."""
CHOICES = {
    COPIES: Choices(recompute=False, order=False, update="device"),
    UPDATES: Choices(recompute=False, order=False),
    AGAIN: Choices(update="device"),
    ALL: Choices(),
}
CASES = tuple(product(LINKS, llama_8b.SHARES, CHOICES))


@cache
def step_of(layers: int | None) -> tuple[StepGraph, Problem]:
    """The step and its memory, captured once in each process."""
    step = llama_8b.captured(layers)
    return step, build_problem(step, Cluster.named("h100"), 1, ())


def row(layers: int | None, link: int, share: float, name: str) -> dict[str, Any]:
    """One plan."""
    step, free = step_of(layers)
    least, most = free.working_set, max(free.profile())
    budget = int(least + share * (most - least))
    rate = Rate(1e-5, link * 2**30)
    host = OffloadTier("host", 1 << 40, rate, rate)
    begun = time.process_time()
    found = planned(step, Cluster.named("h100"), budget, (host,), choices=CHOICES[name])
    return {
        "link_gib_s": link,
        "budget_gib": budget / 2**30,
        "choices": name,
        "step_s": found.plan.seconds,
        "updates_on_host": sum(is_update(node) for node in found.graph.nodes),
        "changed": found.changed,
        "planning_s": time.process_time() - begun,
    }


def results(layers: int | None, workers: int) -> Iterator[dict[str, Any]]:
    """What is to be kept, after each plan; those of `workers` processes at a time."""
    step, free = step_of(layers)
    kept: dict[str, Any] = {
        "simulated": True,
        "nodes": free.nodes,
        "parameters": sum(entry.kind == "parameter" for entry in step.inputs),
        "without_a_budget_s": free.starts[-1],
        "peak_gib": max(free.profile()) / 2**30,
        "of": len(CASES),
        "rows": [],
    }
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for found in pool.map(row, [layers] * len(CASES), *zip(*CASES, strict=True)):
            kept["rows"].append(found)
            yield kept


def main() -> None:
    """Plan all cases, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="of the model; a result is kept for all of them only")
    parser.add_argument("--workers", type=int, default=1, help="processes that plan at the same time")
    given = parser.parse_args()
    kept: dict[str, Any] = {}
    for kept in results(given.layers, given.workers):
        last = kept["rows"][-1]
        print(
            f"{last['link_gib_s']} GiB/s, {last['budget_gib']:.1f} GiB, {last['choices']}: {last['step_s']:.3f} s a "
            f"step ({'; '.join(last['changed']) or 'nothing changed'}); planned in {last['planning_s']:.1f} s",
            flush=True,
        )
        if given.layers is None:
            write("offload_choices", kept)
            put(DOCS / "recomputation.md", "offload_choices.py", again(kept))
            put(DOCS / "host-update.md", "offload_choices.py", updates(kept))
    print("\n".join(["", *again(kept), "", *updates(kept)]))


if __name__ == "__main__":
    main()
