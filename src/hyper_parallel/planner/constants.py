"""Constants of the cost model, fitted on published runs, each with its unit, its meaning and its prior.

They belong to no model, source or row. `tools/fit_constants` fits them on the runs of some sources and holds them
against the others; `constants.json` beside this file has the outcome over all of them. What a maker publishes, or
`hyper-parallel calibrate` measures, is in `cluster` and never here. `constants_for` puts the rates of a cluster's links
in their place for the profile whose collectives `simulate` prices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import Array, Profile

FITTED = Path(__file__).with_name("constants.json")
Capacity = TypeVar("Capacity", float, Array)


@dataclass(frozen=True)
class Constants:
    """All positive; they are fitted as logarithms. The defaults are the priors, not the fitted values."""

    volta: float = 0.60  # share of peak: large products of a step, Volta
    ampere: float = 0.76  # share of peak: large products of a step, Ampere
    hopper: float = 0.62  # share of peak: large products of a step, Hopper, whose clock falls under load
    first: float = 0.82  # ratio: products on Hopper by the library's first choice of kernel, to the best's
    blackwell: float = 0.52  # share of peak: large products of a step, Blackwell
    ultra: float = 1.2  # ratio: Blackwell Ultra to Blackwell: it may draw more power
    ascend: float = 0.62  # share of peak: large products of a step, Ascend
    other: float = 0.60  # share of peak: large products of a step, other devices
    eight: float = 1.15  # ratio: share of the peak in 8 bits to that in 16
    eight_hopper: float = 0.87  # ratio: the same on Hopper, which then draws more power than it may
    four: float = 0.75  # ratio: share of the peak in 4 bits to that in 16
    half_rows: float = 120.0  # rows: rows of a product at which half of its rate is reached
    half_columns: float = 150.0  # columns: columns of a product at which half of its rate is reached
    half_depth: float = 140.0  # terms: inner size of a product at which half of its rate is reached
    grouped: float = 1.0  # ratio: an expert's product beside a plain one: 1.1 on A100, 0.9 on B200
    attention: float = 1.0  # ratio: fused attention beside its published rate
    memory: float = 0.90  # share of bandwidth: copies, and operands of products
    issue: float = 4.0  # instructions: what an operator that moves bytes executes for each of them
    elementwise: float = 1.0  # ratio: bytes of norms, activations and residuals beside the count
    unfused: float = 2.2  # ratio: bytes of these where a framework does not fuse them
    permute: float = 1.0  # ratio: bytes of sorting rows by expert and back beside the count
    launch: float = 22e-6  # s: what a kernel costs the host that launches it
    grace: float = 1.3  # ratio: a launch of a Grace's cores to one of an x86 server's
    stretches: float = 4.0  # power of a pass's mean of host and device: the higher, the nearer to the longer
    routing: float = 200.0  # kernels: launches of a routed layer, its waits counted as launches
    inside: float = 0.75  # share of bandwidth: collectives on links inside a node or supernode
    across: float = 0.80  # share of bandwidth: rings on the network
    scattered: float = 0.65  # share of bandwidth: all-to-alls on the network
    dispatch: float = 0.88  # share of bandwidth: tokens on the network, sent by a library made for it
    crowding: float = 0.2  # share: what each doubling of nodes takes from a network whose paths they share
    hop: float = 14e-6  # s: a collective's latency for each doubling of its ranks inside a node
    net_hop: float = 25e-6  # s: the same on the network
    hidden_tensor: float = 0.7  # share: tensor collectives hidden by frameworks that overlap them
    hidden_expert: float = 0.4  # share: exchanges of experts hidden by frameworks that overlap them
    hidden_data: float = 0.8  # share: gradients' reduction hidden by frameworks that overlap it
    beside: float = 0.13  # share: how much a collective slows kernels that run beside it
    imbalance: float = 1.2  # ratio: the fullest rank's tokens to the mean where routing is not forced
    straggling: float = 0.005  # share: what each doubling of devices beyond eight adds to a step
    fixed: float = 0.010  # s: a step's work that does not depend on its size
    slack: float = 1.03  # ratio: bytes that an allocator cannot do without to those allocated
    outside: float = 1.5e9  # B: the driver's and the collectives' own buffers

    def usable(self, capacity: Capacity) -> Capacity:
        """Bytes of a device's memory that a run may allocate."""
        return (capacity - self.outside) / self.slack


@cache
def fitted() -> Constants:
    """The constants that were fitted on all published runs."""
    return Constants(**json.loads(FITTED.read_text())["constants"])


# Constants of links as a cluster states them, for the profile whose collectives `simulate` orders and prices.
#
# The shares of the bandwidth that collectives reach, and what more nodes take from the network, are fitted on published
# runs of other frameworks, with whatever those left unhidden. `simulate` prices the collectives of `train` alone on
# their links (`cluster.Link.reached`), so that an estimate with other rates would choose another strategy than it:
#
#     inside = efficiency of the node's links, across = of the network's, crowding = 0                `constants_for`
#
# Where links of levels inside the network reach different shares, the lowest one holds for all. Latencies stay as
# fitted.

_NOTHING = 1e-6
"""A constant is positive."""


def constants_for(profile: Profile, cluster: Cluster) -> Constants:
    """The fitted constants; for what `train` runs, with the rates of the cluster's links."""
    known = fitted()
    if not profile.ordered:
        return known
    inner = [
        cluster.link(level).efficiency for level in ("root", "node", "supernode") if level in cluster.links
    ]
    outer = cluster.links.get("network")
    # A level that a cluster lacks is joined by no group, and repeats the next one (`table.of_cluster`).
    inside = min(inner) if inner else outer.efficiency if outer else known.inside
    across = outer.efficiency if outer else inside
    return replace(known, inside=inside, across=across, scattered=across, crowding=_NOTHING)
