"""Order of collectives: the pass that decides it, and the digest by which all ranks agree on it.

Collectives of different ranks meet in the order in which each rank begins them. The order is a function of the step's
graph and of the cluster's description, and every rank has its own; so all compare a digest before the first step.
"""

from __future__ import annotations

import hashlib

import torch
from torch import fx

from hyper_parallel.cluster import MEASURED, Cluster
from hyper_parallel.graph import Pass, StepGraph, is_collective
from hyper_parallel.graph.ir import group_of, values_of
from hyper_parallel.overlap.fsdp_baseline_schedule import layered
from hyper_parallel.overlap.order_search import Overlap
from hyper_parallel.shard.process_mesh import planning_cluster
from hyper_parallel.strategy import Strategy

DIGEST = 8
"""Numbers of a digest, each a byte."""

APART = (
    "the ranks found different orders of collectives, so all keep the order of the model's code: as right, but with "
    "less communication hidden. Ranks with other devices or other cluster files do this; "
    "strategy.overlap.schedule=usual depends on neither, and none is silent."
)


def order_pass(strategy: Strategy, cluster: Cluster | None, device: torch.device | str) -> Pass | None:
    """The pass that orders a step's collectives; None where they stay in the order of the model's code.

    `cluster`: the described machine on which the step runs; None for the machine at hand, whose preset follows from the
    name of `device`. A measured cluster counts as the machine at hand. The cluster that the strategy names comes first.
    Raises ConfigError for a cluster that is unknown or describes no device.
    """
    settings = strategy.overlap
    if settings.schedule == "none" or strategy.axes.world == 1:
        return None
    if settings.schedule == "usual":
        return layered
    if cluster is None or cluster.name == MEASURED or settings.cluster is not None:
        cluster = planning_cluster(strategy, "overlap", torch.device(device).type)
    return layered if cluster is None else Overlap(cluster, pieces=settings.pieces)


def order_digest(step: StepGraph) -> list[float]:
    """The collectives of a step, in order, as `DIGEST` numbers; steps with the same can run on different ranks.

    Of each its name in the graph, so that two of one kind and size are not taken for each other; its operator, axis,
    dtype and shape.
    """
    digest = hashlib.blake2b(digest_size=DIGEST)
    for node in step.nodes:
        if is_collective(node):
            digest.update(f"{node.name} {described(step, node)}\n".encode())
    return [float(byte) for byte in digest.digest()]


def described(step: StepGraph, node: fx.Node) -> str:
    """A collective's operator, axis, dtypes and shapes."""
    kinds = [(value.dtype, tuple(value.shape)) for value in values_of(node)]
    return f"{node.target} {group_of(step, node).axis} {kinds}"
