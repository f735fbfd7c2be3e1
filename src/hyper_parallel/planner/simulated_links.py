"""Constants of links as a cluster states them, for the profile whose collectives `simulate` orders and prices.

The shares of the bandwidth that collectives reach, and what more nodes take from the network, are fitted on published
runs of other frameworks, with whatever those left unhidden. `simulate` prices the collectives of `train` alone on their
links (`cluster.Link.reached`), so that an estimate with other rates would choose another strategy than it:

    inside = efficiency of the node's links, across = of the network's, crowding = 0                `constants_for`

Where links of a supernode reach another share than a node's, the lower one holds for both. Latencies stay as fitted.
"""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.profile import Profile

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
