"""Which planned strategies `train` can run."""

from __future__ import annotations

from collections.abc import Iterable

from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.run_file import PIPELINES


def note(shown: Iterable[tuple[str, Figures]]) -> list[str]:
    """A line that names the shown strategies which `train` refuses; none where it runs all of them. Each comes with the
    name under which it is shown.
    """
    refused = []
    for name, found in shown:
        given = found.strategy
        if given["pipeline"] != 1 and given["schedule"] not in PIPELINES:
            refused.append(name)
    if not refused:
        return []
    return [f"train refuses {_listed(refused)}: it has no DualPipe; --runnable keeps to what train runs"]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
