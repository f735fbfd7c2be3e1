"""Which planned strategies `train` can run."""

from __future__ import annotations

from collections.abc import Iterable

from hyper_parallel.planner.format import ON_HOST
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.run_file import PIPELINES


def note(shown: Iterable[tuple[str, Figures]]) -> list[str]:
    """A line that names the shown strategies which `train` refuses, or runs with other recomputation; none where it
    runs all of them. Each comes with the name under which it is shown.
    """
    refused, other = [], []
    for name, found in shown:
        given = found.strategy
        if given["pipeline"] != 1 and (
            given["schedule"] not in PIPELINES or any(given.get(column) for column in ON_HOST)
        ):
            refused.append(name)
        elif given["recompute"] == "selective" or (
            given["recompute"] == "full" and float(given["recomputed"]) < 1
        ):
            other.append(name)
    said = []
    if refused:
        said.append(f"train refuses {_listed(refused)}: it has no DualPipe, and no budget with a pipeline")
    if other:
        said.append(f"train runs {_listed(other)} with other recomputation: it recomputes all layers or none")
    return [f"{'; '.join(said)}; --runnable keeps to what train runs"] if said else []


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
