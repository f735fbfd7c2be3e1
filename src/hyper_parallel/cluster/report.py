"""Placement warnings: axes that span link levels, and levels that are not full."""

from __future__ import annotations

from hyper_parallel.cluster.cluster import Cluster
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.strategy import LEVELS, Strategy


def misplaced(strategy: Strategy, cluster: Cluster) -> list[str]:
    """One line for each axis that spans more than its level, with the consequence.

    >>> strategy = Strategy(axes={"shard": 16}, placement={"node": ["shard"], "devices": {"node": 8}})
    >>> misplaced(strategy, Cluster.of(strategy))
    ['shard (16) is placed on node but spans node 8 · network 2: its collectives run level by level']
    """
    placement, mesh = strategy.placement, Mesh.of(strategy)
    lines = []
    for level in LEVELS:
        for axis in getattr(placement, level):
            if mesh.size(axis) == 1:
                continue
            # Groups at a boundary may lie differently from the first: the one on the most levels is reported.
            ranks = max(mesh.groups(axis), key=lambda ranks: len(cluster.spans(ranks)))
            spanned = cluster.spans(ranks)
            if spanned == (level,):
                continue
            head = f"{axis} ({mesh.size(axis)}) is placed on {level} but"
            radices = cluster.radices(ranks)
            if radices is None:
                lines.append(
                    f"{head} lies on {' and '.join(spanned)} in unequal parts: its collectives run flat"
                )
            elif len(spanned) > 1:
                parts = " · ".join(f"{name} {size}" for name, size in reversed(radices))
                how = "level by level" if placement.collectives == "levels" else "flat"
                lines.append(f"{head} spans {parts}: its collectives run {how}")
            else:
                lines.append(f"{head} fits into {spanned[0]}, and lies there")
    return lines
