"""What each kind of change to a step's graph gains under a budget: python benchmarks/offload_choices.py [--workers 2]

The step of a Llama of 8B's shape on one H100, alone on its host, links to the host of 25 and 50 GiB/s
each way, three budgets. Each case is planned with copies alone; with updates on the host as well; with recomputation
and another order; with all of them. Written down are the seconds of a step that the planner foresees, and those of a
processor that planning took. The result and the pages that show it are written after each plan: a run that is stopped
keeps what it has.

Nothing here ran on such a machine: times are those of the planner's clock, simulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Annotated, Any

from campaigns import in_processes
from commandline import run
from pages import Benchmark, table
from training import SHARES, llama_8b_step

from harness.memory_problems import under
from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.host_nodes import is_update
from hyper_parallel.offloading import OffloadTier, Rate, build_problem
from hyper_parallel.offloading.schedule.allowed_rewrites import Choices
from hyper_parallel.offloading.schedule.offload_pass import planned
from hyper_parallel.offloading.schedule.problem import Problem

COPIES, UPDATES, AGAIN, ALL = "copies alone", "updates on the host", "recomputation and order", "all"
"""What a plan may do, beside copies."""
LINKS = (25, 50)
"""GiB/s each way."""
CHOICES = {
    COPIES: Choices(recompute=False, order=False, update="device"),
    UPDATES: Choices(recompute=False, order=False),
    AGAIN: Choices(update="device"),
    ALL: Choices(),
}
CASES = tuple(product(LINKS, SHARES, CHOICES))
_CALLED = {
    COPIES: "copies alone",
    UPDATES: "updates on the host as the only choice",
    AGAIN: "these choices",
    ALL: "all of them",
}
_Case = Mapping[str, Mapping[str, Any]]
"""A link and a budget: the row of each kind of choice that was planned there."""


@cache
def step_of() -> tuple[StepGraph, Problem]:
    """The step and its memory, captured once in each process."""
    step = llama_8b_step()
    return step, build_problem(step, Cluster.named("h100"), 1, ())


def row(case: tuple[int, float, str]) -> dict[str, Any]:
    link, share, name = case
    step, free = step_of()
    budget = under(free, share).budget
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


def again(kept: Mapping[str, Any]) -> Iterator[str]:
    """What recomputation and another order gain, with updates on the device."""
    yield from (f"{_setting(kept)} Updates run on the device.", "")
    rows = []
    for case in _cases(kept["rows"]):
        saved = ""
        if COPIES in case and AGAIN in case:
            saved = f"{1 - case[AGAIN]['step_s'] / case[COPIES]['step_s']:.0%}"
        rows.append((*_place(case), _seconds(case, COPIES), _seconds(case, AGAIN), saved))
    yield from table("Link each way | Budget | Copies alone | With these choices | Saved", rows)
    yield ""
    yield from _ending(kept, COPIES, AGAIN)


def updates(kept: Mapping[str, Any]) -> Iterator[str]:
    """What updates on the host gain, alone and together with the other choices."""
    cases = _cases(kept["rows"])
    yield from (_setting(kept), "")
    yield from table(
        "Link each way | Budget | Copies alone | and updates there | Other choices | and updates there",
        ((*_place(case), *(_seconds(case, name) + _apart(case, name) for name in CHOICES)) for case in cases),
    )
    yield ""
    yield f"In brackets: how many of the {kept['parameters']} parameters are updated there, on the host."
    if missed := [" and ".join(_place(case)) for case in cases if _misses(case)]:
        yield (
            f"At {'; '.join(missed)} all choices together come to a slower step than some of them: a search tries a "
            "few graphs of many, and missed the best."
        )
    yield from _ending(kept, UPDATES, ALL)


def _setting(kept: Mapping[str, Any]) -> str:
    return (
        f"Simulated: the step of a Llama of 8B's shape on one H100, alone on its host ({kept['nodes']:,} nodes, "
        f"{kept['peak_gib']:.1f} GiB at its peak, {kept['without_a_budget_s']:.3f} s without a budget)."
    )


def _ending(kept: Mapping[str, Any], *names: str) -> Iterator[str]:
    """How long planning took, and how much of the benchmark was run."""
    for name in names:
        took = [row["planning_s"] for row in kept["rows"] if row["choices"] == name]
        if took:
            yield f"Planning with {_CALLED[name]} took {min(took):.1f} to {max(took):.1f} s of a processor."
    if len(kept["rows"]) < kept["of"]:
        yield f"So far {len(kept['rows'])} of the benchmark's {kept['of']} plans were made."
    yield "([Result](../benchmarks/results/offload_choices.json) of `python benchmarks/offload_choices.py`.)"


def _cases(rows: Sequence[Mapping[str, Any]]) -> list[_Case]:
    found: dict[tuple[float, float], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["link_gib_s"], row["budget_gib"]), {})[row["choices"]] = row
    return list(found.values())


def _misses(case: _Case) -> bool:
    """Whether fewer choices gave a quicker step, by more than rounding shows."""
    return ALL in case and min(one["step_s"] for one in case.values()) < case[ALL]["step_s"] - 5e-4


def _place(case: _Case) -> tuple[str, str]:
    row = next(iter(case.values()))
    return f"{row['link_gib_s']} GiB/s", f"{row['budget_gib']:.1f} GiB"


def _seconds(case: _Case, name: str) -> str:
    return f"{case[name]['step_s']:.3f} s" if name in case else "not run yet"


def _apart(case: _Case, name: str) -> str:
    count = case[name]["updates_on_host"] if name in case else 0
    return f" ({count})" if count else ""


BENCHMARK = Benchmark("offload_choices", {"recomputation.md": again, "host-update.md": updates})


def main(workers: Annotated[int, "processes that plan at the same time"] = 1) -> None:
    step, free = step_of()
    about = {
        "simulated": True,
        "nodes": free.nodes,
        "parameters": sum(entry.kind == "parameter" for entry in step.inputs),
        "without_a_budget_s": free.starts[-1],
        "peak_gib": max(free.profile()) / 2**30,
        "of": len(CASES),
    }
    rows: dict[tuple[int, float, str], dict[str, Any]] = {}
    for case, found in in_processes(row, CASES, workers, per_process=len(CASES)):
        rows[case] = found
        print(found, flush=True)
        BENCHMARK.keep({**about, "rows": [rows[case] for case in CASES if case in rows]})


if __name__ == "__main__":
    run(main)
