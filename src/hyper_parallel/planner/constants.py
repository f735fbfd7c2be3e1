"""Numbers that are fitted on published runs, each with its unit, its meaning and the value it is drawn to.

They belong to no model, source or row. `fit.cross_validation` finds them on the runs of some sources and holds them
against the others; `constants.json` beside this file has the outcome over all of them. What a maker publishes, or
`hyper-parallel calibrate` measures, is in `cluster` and never here. `constants_for` puts the rates of a cluster's links
in their place for the profile whose collectives `simulate` prices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import Profile

FITTED = Path(__file__).with_name("constants.json")


def _number(value: float, spread: float, unit: str, meaning: str) -> Any:
    """A constant: the value it is drawn to, how far off it may well be (of its logarithm; 0: times do not tell)."""
    return field(default=value, metadata={"spread": spread, "unit": unit, "meaning": meaning})


@dataclass(frozen=True)
class Constants:
    """All positive; `fit` works on their logarithms. The defaults are the priors, not the fitted values."""

    volta: float = _number(0.60, 0.15, "share of peak", "large products of a step, Volta")
    ampere: float = _number(0.76, 0.15, "share of peak", "large products of a step, Ampere")
    hopper: float = _number(
        0.62, 0.2, "share of peak", "large products of a step, Hopper, whose clock falls under load"
    )
    first: float = _number(
        0.82,
        0.1,
        "ratio",
        "products on Hopper by the library's first choice of a kernel, to those of the best",
    )
    blackwell: float = _number(0.52, 0.2, "share of peak", "large products of a step, Blackwell")
    ultra: float = _number(1.2, 0.05, "ratio", "Blackwell Ultra to Blackwell: it may draw more power")
    ascend: float = _number(0.62, 0.2, "share of peak", "large products of a step, Ascend")
    other: float = _number(0.60, 0.2, "share of peak", "large products of a step, other devices")
    eight: float = _number(1.15, 0.15, "ratio", "share of the peak in 8 bits to that in 16")
    eight_hopper: float = _number(
        0.87, 0.1, "ratio", "the same on Hopper, which then draws more power than it may"
    )
    four: float = _number(0.75, 0.15, "ratio", "share of the peak in 4 bits to that in 16")
    half_rows: float = _number(120.0, 0.25, "rows", "rows of a product at which half of its rate is reached")
    half_columns: float = _number(
        150.0, 0.25, "columns", "columns of a product at which half of its rate is reached"
    )
    half_depth: float = _number(
        140.0, 0.25, "terms", "inner size of a product at which half of its rate is reached"
    )
    grouped: float = _number(
        1.0, 0.05, "ratio", "an expert's product beside a plain one of its shape: 1.1 on A100, 0.9 on B200"
    )
    attention: float = _number(1.0, 0.2, "ratio", "fused attention beside its published rate")
    memory: float = _number(0.75, 0.15, "share of bandwidth", "operators that only move bytes")
    elementwise: float = _number(
        1.0, 0.2, "ratio", "bytes of norms, activations and residuals beside the count"
    )
    unfused: float = _number(2.2, 0.3, "ratio", "bytes of these where a framework does not fuse them")
    permute: float = _number(1.5, 0.3, "ratio", "bytes of sorting rows by expert and back beside the count")
    launch: float = _number(22e-6, 0.3, "s", "what a kernel costs the host that launches it")
    stretches: float = _number(
        4.0,
        0.3,
        "power",
        "of the power mean of host and device that a pass takes: the higher, the nearer to the longer",
    )
    routing: float = _number(
        200.0, 0.3, "kernels", "launches of a routed layer, its waits counted as launches"
    )
    inside: float = _number(
        0.75, 0.15, "share of bandwidth", "collectives on links inside a node or supernode"
    )
    across: float = _number(0.65, 0.2, "share of bandwidth", "collectives on the network")
    dispatch: float = _number(
        0.88, 0.08, "share of bandwidth", "tokens on the network, sent by a library made for it"
    )
    crowding: float = _number(0.2, 0.5, "share", "what each doubling of nodes takes from the network's rate")
    hop: float = _number(
        14e-6, 0.4, "s", "a collective's latency for each doubling of its ranks inside a node"
    )
    net_hop: float = _number(25e-6, 0.4, "s", "the same on the network")
    hidden_tensor: float = _number(
        0.7, 0.3, "share", "tensor collectives hidden by frameworks that overlap them"
    )
    hidden_expert: float = _number(
        0.4, 0.4, "share", "exchanges of experts hidden by frameworks that overlap them"
    )
    hidden_data: float = _number(
        0.8, 0.2, "share", "gradients' reduction hidden by frameworks that overlap it"
    )
    beside: float = _number(0.13, 0.3, "share", "how much a collective slows kernels that run beside it")
    imbalance: float = _number(
        1.2, 0.1, "ratio", "the fullest rank's tokens to the mean where routing is not forced"
    )
    straggling: float = _number(
        0.005, 0.4, "share", "what each doubling of devices beyond eight adds to a step"
    )
    fixed: float = _number(0.010, 0.5, "s", "a step's work that does not depend on its size")
    slack: float = _number(1.03, 0.0, "ratio", "bytes that an allocator cannot do without to those allocated")
    outside: float = _number(1.5e9, 0.0, "B", "the driver's and the collectives' own buffers")

    def dump(self, path: Path, note: str) -> None:
        """Write them as JSON with a note of what they were fitted on."""
        path.write_text(json.dumps({"note": note, "constants": asdict(self)}, indent=1) + "\n")

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Constants:
        """From a mapping; what it lacks keeps its prior."""
        known = {one.name for one in fields(cls)}
        assert set(values) <= known, sorted(set(values) - known)
        return cls(**values)


@cache
def fitted() -> Constants:
    """Those that were fitted on all published runs."""
    return Constants.of(json.loads(FITTED.read_text())["constants"])


# Constants of links as a cluster states them, for the profile whose collectives `simulate` orders and prices.
#
# The shares of the bandwidth that collectives reach, and what more nodes take from the network, are fitted on published
# runs of other frameworks, with whatever those left unhidden. `simulate` prices the collectives of `train` alone on
# their links (`cluster.Link.reached`), so that an estimate with other rates would choose another strategy than it:
#
#     inside = efficiency of the node's links, across = of the network's, crowding = 0                `constants_for`
#
# Where links of a supernode reach another share than a node's, the lower one holds for both. Latencies stay as fitted.

_NOTHING = 1e-6
"""A constant is positive."""


def constants_for(profile: Profile, cluster: Cluster) -> Constants:
    """The fitted constants; for what `train` runs, with the rates of the cluster's links."""
    known, links = fitted(), cluster.links
    if not profile.ordered:
        return known
    inner = [links[level].efficiency for level in ("node", "supernode") if level in links]
    outer = links.get("network")
    # A level that a cluster lacks is joined by no group, and repeats the next one (`table.of_cluster`).
    inside = min(inner) if inner else outer.efficiency if outer else known.inside
    return replace(known, inside=inside, across=outer.efficiency if outer else inside, crowding=_NOTHING)
