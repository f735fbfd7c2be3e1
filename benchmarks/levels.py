"""What crosses the slow links: python benchmarks/levels.py

Collectives over one axis that spans link levels, flat and level by level, on simulated ranks whose results are
compared. The calls that are made are counted, and of these what leaves a node (or supernode) for each device in it;
hyper_parallel.cluster.traffic says how a flat call is taken to run: a ring in rank order, and the worst ring, of
which every link is slow. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measure import write

from hyper_parallel.cluster import Cluster, crossing
from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import each_rank, per_rank, simulated_ranks
from hyper_parallel.layout import Mesh
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.strategy import Strategy

Move = Callable[[Axis, torch.Tensor], torch.Tensor]
ByLevel = dict[str, dict[str, dict[str, float]]]

MACHINES = (
    (16, Cluster(node=8)),
    (64, Cluster(node=8)),
    (64, Cluster(node=4, supernode=16)),
)
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
        found = {}
        for name, known in (("levels", cluster), ("flat", None)):
            axis = ProcessMesh.of(mesh, known)["shard"]
            with collectives.counting() as counted:
                found[name] = (each_rank(move(axis, x)), counted)
        assert all(
            torch.equal(piece, found["flat"][0][rank]) for rank, piece in found["levels"][0].items()
        ), kind
    levels, flat = found["levels"][1], found["flat"][1]
    result: ByLevel = {}
    for level in cluster.levels[:-1]:
        ours = crossing(levels, cluster, level)
        ring = crossing(flat, cluster, level)
        worst = crossing(flat, cluster, level, order="worst")
        chunk = 32 * 4
        result[level] = {
            "chunks": {
                "levels": float(ours.bytes / chunk),
                "flat": float(ring.bytes / chunk),
                "worst": float(worst.bytes / chunk),
            },
            "messages": {
                "levels": float(ours.messages),
                "flat": float(ring.messages),
                "worst": float(worst.messages),
            },
        }
    return result


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    cases: dict[str, dict[str, ByLevel]] = {}
    print("Chunks (a rank's share of the whole) and messages that leave for each device:\n")
    print(
        "| machine | collective | out of a | chunks: levels | flat ring | worst ring | messages: levels | flat |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for world, cluster in MACHINES:
        machine = f"{world} ranks, nodes of {cluster.node}"
        if cluster.supernode:
            machine += f", supernodes of {cluster.supernode}"
        cases[machine] = {kind: measure(world, cluster, kind) for kind in KINDS}
        for kind, by_level in cases[machine].items():
            for level, row in by_level.items():
                chunks, messages = row["chunks"], row["messages"]
                figures = [*chunks.values(), messages["levels"], messages["flat"]]
                print(f"| {machine} | {kind} | {level} | {' | '.join(f'{f:g}' for f in figures)} |")
    write("levels", {"cases": cases})


if __name__ == "__main__":
    main()
