"""How a run dispatches tokens to experts, as its row or its framework's recipes state it.

A row says so in the framework's name, in the notes (words of `csv_cells.WORDS`), or in the notes' options `etp`. What
neither says is the profile's, and open where that is.
"""

from __future__ import annotations

import re

from hyper_parallel.planner.fit.csv_cells import Cells
from hyper_parallel.planner.framework_profiles import (
    MEGATRON_BRIDGE_MIXTURES,
    MEGATRON_BRIDGE_NVL72,
    MEGATRON_BRIDGE_RECIPES,
)
from hyper_parallel.planner.profile import Profile
from hyper_parallel.workload.shape import Shape

_STATED: tuple[tuple[str, dict[str, float]], ...] = (
    (r"deep[-_ ]?ep|hybrid[-_ ]?ep", {"dedup": 1.0}),
    (r"all[-_ ]?to[-_ ]?all|allgather", {"dedup": 0.0}),
    (r"(a2a|1f1b|ep)[-_ ]overlap", {"overlap_expert": 1.0}),
    (r"forced?[-_ ]balanc|balanced gate", {"even": 1.0}),
    # Megatron's --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split.
    (r"loss in split", {"balanced": 1.0}),
    # Experts with a capacity have static shapes: the host waits for no counts.
    (r"\(token ?drop\)", {"even": 1.0, "graphs": 1.0}),
)
"""What words say; later ones add to earlier ones."""


def profile_of_mixture(profile: Profile, shape: Shape, supernode: float) -> Profile:
    """The profile that recipes of mixtures have on a machine, for a framework whose recipes differ by machine."""
    if profile is not MEGATRON_BRIDGE_RECIPES or not shape.experts:
        return profile
    return MEGATRON_BRIDGE_NVL72 if supernode > 1 else MEGATRON_BRIDGE_MIXTURES


def stated(cells: Cells) -> dict[str, float]:
    """The columns of dispatch that a row states in words."""
    words = f"{cells.text('framework')}; {cells.text('notes')}".lower()
    found: dict[str, float] = {}
    for pattern, columns in _STATED:
        if re.search(pattern, words):
            found |= columns
    return found


def expert_tensor(
    cells: Cells, profile: Profile, shape: Shape, tensor: int, ranks: int, filled: dict[str, str]
) -> int:
    """Ranks that split an expert's features; `ranks` are those of a pipeline stage by the degree of `ep`."""
    option = cells.option("etp")
    if not shape.experts or (option and not option.isdigit()):
        return 1
    if option:
        return max(1, int(option)) if ranks % max(1, int(option)) == 0 else 1
    taken = tensor if profile.defaults.expert_tensor == "tensor" and ranks % tensor == 0 else 1
    if taken > 1:
        filled["etp"] = f"{taken}, as tensor parallelism: the default of {profile.name}"
    return taken
