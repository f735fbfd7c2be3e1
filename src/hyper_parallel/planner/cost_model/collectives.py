"""Collective times on a cluster's links, level by level, vectorized over configurations.

A group of n ranks of which `inside` lie between neighbours has, on each level,

    g_node = clip(node / inside, 1, n)     g_super = clip(supernode / (inside · g_node), 1, n / g_node)
    g_net  = n / (g_node · g_super)                                                            `RankGroup`

and runs as `cluster.collective.legs` has it: gathers go across with shards and inside with what was gathered, so that
B bytes of result cost

    gather(B) = Σ_levels (g − 1) / g · B_level / rate_level + log₂(g) · hop_level              `RankGroup.gather`
    B_node = B,  B_super = B / g_node,  B_net = B / (g_node · g_super)

A reduce-scatter costs the same, an all-reduce twice that. (Patarasu and Yuan, JPDC 69(2), 2009, by levels as in
Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005; the latency of trees, to which NCCL turns for small messages.)
An exchange in which each rank sends B bytes, equally to all, costs

    exchange(B) = B · ((g_node − 1) / n / rate_node + (g_super − 1) g_node / n / rate_super
                       + (1 − 1 / g_net) c / rate_net)

where c is how many copies of what crosses the network there are for each that is needed (`RankGroup.exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.kernels import Array
from hyper_parallel.planner.table import Table


@dataclass(frozen=True)
class RankGroup:
    """Ranks that run a collective together, as a product of levels."""

    node: Array
    supernode: Array
    network: Array
    node_rate: Array
    supernode_rate: Array
    network_rate: Array
    hop: float
    net_hop: float

    @classmethod
    def of(cls, t: Table, k: Constants, ranks: Array, inside: Array) -> RankGroup:
        """`ranks` ranks, `inside` ranks from one to the next."""
        node = np.clip(t.node / inside, 1, ranks)
        supernode = np.clip(t.supernode / (inside * node), 1, ranks / node)
        network = ranks / (node * supernode)
        return cls(
            node,
            supernode,
            network,
            t.node_rate * k.inside,
            t.supernode_rate * k.inside,
            t.network_rate * k.across / (1 + k.crowding * np.log2(np.maximum(network, 1.0))),
            k.hop,
            k.net_hop,
        )

    @property
    def ranks(self) -> Array:
        """Its size."""
        return self.node * self.supernode * self.network

    def gather(self, bytes: Array) -> Array:
        """Seconds until every rank has `bytes`, of which each had its share; of a reduce-scatter too."""
        inner = self.node * self.supernode
        seconds = (1 - 1 / self.node) * bytes / self.node_rate
        seconds = seconds + (1 - 1 / self.supernode) * bytes / self.node / self.supernode_rate
        seconds = seconds + (1 - 1 / self.network) * bytes / inner / self.network_rate
        return seconds + self.latency

    def reduce(self, bytes: Array) -> Array:
        """Seconds of an all-reduce of `bytes` on each rank."""
        return 2 * self.gather(bytes)

    def exchange(self, bytes: Array, copies: Array | float = 1.0) -> Array:
        """Seconds of an all-to-all in which each rank gives `bytes`.

        `copies`: what crosses the network, as a share of what goes to ranks of other nodes; below 1 where a row goes
        once to a node and is handed out there.
        """
        n = self.ranks
        inner = self.node * self.supernode
        seconds = (self.node - 1) / n / self.node_rate + (
            self.supernode - 1
        ) * self.node / n / self.supernode_rate
        seconds = bytes * (seconds + (1 - inner / n) * copies / self.network_rate)
        return seconds + self.latency

    def send(self, bytes: Array) -> Array:
        """Seconds of sending `bytes` to the next rank of the group, over the slowest level that it spans."""
        rate = np.where(
            self.network > 1,
            self.network_rate,
            np.where(self.supernode > 1, self.supernode_rate, self.node_rate),
        )
        wait = np.where(self.network > 1, self.net_hop, self.hop)
        return np.where(self.ranks > 1, bytes / rate + wait, 0.0)

    @property
    def latency(self) -> Array:
        """Seconds of a collective of nothing."""
        return self.hop * np.log2(self.node * self.supernode) + self.net_hop * np.log2(self.network)
