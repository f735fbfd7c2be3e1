"""What each kind of change to a step's graph gains under a budget: python benchmarks/offload_choices.py [--layers N]

The step of `offload_bounds.py` (a Llama of 8B's shape on one H100, alone on its host), links to the host of 25 and 50
GiB/s each way, three budgets. Each case is planned with copies alone; with updates on the host as well; with
recomputation and another order; with all of them. Written down are the seconds of a step that the planner foresees, and
those of a processor that planning took.

Nothing here ran on such a machine: times are those of the planner's clock, simulated.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import llama_8b
from measure import write

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph.apart import is_update
from hyper_parallel.offloading import Rate, Space, problem_of
from hyper_parallel.offloading.choices import Choices
from hyper_parallel.offloading.rewrite import planned

LINKS = (25, 50)
"""GiB/s each way."""
CHOICES = {
    "copies alone": Choices(recompute=False, order=False, update="device"),
    "updates on the host": Choices(recompute=False, order=False),
    "recomputation and order": Choices(update="device"),
    "all": Choices(),
}


def main() -> None:
    """Plan all cases, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="of the model; a result is kept for all of them only")
    given = parser.parse_args()
    step, cluster = llama_8b.captured(given.layers), Cluster.named("h100")
    free = problem_of(step, cluster, 1, ())
    least, most = free.working_set, max(free.profile())
    rows: list[dict[str, Any]] = []
    for link in LINKS:
        rate = Rate(1e-5, link * 2**30)
        host = Space("host", 1 << 40, rate, rate)
        for share in llama_8b.SHARES:
            budget = int(least + share * (most - least))
            for name, choices in CHOICES.items():
                begun = time.process_time()
                found = planned(step, cluster, budget, (host,), choices=choices)
                took = time.process_time() - begun
                apart = sum(is_update(node) for node in found.graph.nodes)
                rows.append(
                    {
                        "link_gib_s": link,
                        "budget_gib": budget / 2**30,
                        "choices": name,
                        "step_s": found.plan.seconds,
                        "updates_on_host": apart,
                        "changed": found.changed,
                        "planning_s": took,
                    }
                )
                print(
                    f"{link} GiB/s, {budget / 2**30:.1f} GiB, {name}: {found.plan.seconds:.3f} s a step "
                    f"({'; '.join(found.changed) or 'nothing changed'}); planned in {took:.1f} s",
                    flush=True,
                )
    kept = {"simulated": True, "without_a_budget_s": free.starts[-1], "peak_gib": most / 2**30, "rows": rows}
    if given.layers is None:
        print(write("offload_choices", kept))


if __name__ == "__main__":
    main()
