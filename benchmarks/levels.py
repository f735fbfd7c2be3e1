"""What crosses the slow links: python benchmarks/levels.py

Collectives over one axis that spans link levels, flat and level by level, on simulated ranks whose results are
compared. The calls that are made are counted, and of these what leaves a node (or supernode) for each device in it;
`traffic` says how a flat call is taken to run: a ring in rank order, and the worst ring, of
which every link is slow. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from commandline import run
from pages import Benchmark
from traffic import crossing

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import each_rank, per_rank, simulated_ranks
from hyper_parallel.layout import Mesh
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.strategy import Strategy

Move = Callable[[Axis, torch.Tensor], torch.Tensor]
ByLevel = dict[str, dict[str, dict[str, float]]]

BENCHMARK = Benchmark("levels")
MACHINES = ((16, Cluster(node=8)), (64, Cluster(node=8)), (64, Cluster(node=4, supernode=16)))
# By kind: whether a rank gives a chunk for each rank of the group, or one in all; and the call.
KINDS: dict[str, tuple[bool, Move]] = {
    "all-reduce": (True, lambda axis, x: axis.reduce(x)),
    "reduce-scatter": (True, lambda axis, x: axis.reduce_split(x, 0)),
    "all-gather": (False, lambda axis, x: axis.gather(x, 0)),
    "all-to-all": (True, lambda axis, x: axis.swap(x, 0, 1)),
}


def measure(world: int, cluster: Cluster, kind: str) -> ByLevel:
    """Level that is crossed, to chunks and messages, to way of running, to what leaves for each device."""
    whole, move = KINDS[kind]
    # A chunk is 32 float32 of whole numbers, so that sums are exact in any order.
    rows = 32 * world if whole else 32
    with simulated_ranks(world):
        mesh = Mesh.of(Strategy(axes={"shard": world}))
        x = per_rank(lambda rank: torch.arange(rows, dtype=torch.float32).view(-1, 1) % 7 + rank)
        found = []
        for known in (cluster, None):
            axis = ProcessMesh.of(mesh, known)["shard"]
            with collectives.counting() as counted:
                found.append((each_rank(move(axis, x)), counted))
        (by_level, levels), (at_once, flat) = found
        assert all(torch.equal(piece, at_once[rank]) for rank, piece in by_level.items()), kind
    chunk = 32 * 4
    result: ByLevel = {}
    for level in cluster.levels[:-1]:
        crossed = {
            "levels": crossing(levels, cluster, level),
            "flat": crossing(flat, cluster, level),
            "worst": crossing(flat, cluster, level, order="worst"),
        }
        result[level] = {
            "chunks": {name: float(one.bytes / chunk) for name, one in crossed.items()},
            "messages": {name: float(one.messages) for name, one in crossed.items()},
        }
    return result


def name_of(world: int, cluster: Cluster) -> str:
    """A machine."""
    supernodes = f", supernodes of {cluster.supernode}" if cluster.supernode else ""
    return f"{world} ranks, nodes of {cluster.node}{supernodes}"


def main() -> None:
    """Count, keep."""
    cases = {
        name_of(world, cluster): {kind: measure(world, cluster, kind) for kind in KINDS}
        for world, cluster in MACHINES
    }
    BENCHMARK.keep({"cases": cases})


if __name__ == "__main__":
    run(main)
