"""Collective times of the planner's rank groups, vectorized over configurations.

The forms are those of `cluster.collective_cost`, the links' bandwidths those of the cluster. The efficiencies and
latencies are corrections fitted on published runs (`planner.constants`): `inside` and `across` are the shares of the
bandwidth that collectives reach, `crowding` is what each doubling of nodes takes from the network, `hop` and
`net_hop` are the latency of each doubling of ranks.

A group of n ranks with stride `inside` between neighbours has, on each level,

    g_node = clip(node / inside, 1, n)     g_super = clip(supernode / (inside · g_node), 1, n / g_node)
    g_net  = n / (g_node · g_super)                                                            `RankGroup`

An all-gather of B bytes of result runs level by level (`legs`) and takes as long as a reduce-scatter of B bytes; an
all-reduce takes twice that. The latency is that of trees (`RankGroup.latency`), which NCCL uses for small messages:

    gather(B) = Σ_levels (g − 1) / g · B_level / rate_level + log₂(g) · hop_level              `RankGroup.gather`
    B_node = B,  B_super = B / g_node,  B_net = B / (g_node · g_super)

An exchange in which each rank sends B bytes directly, equally to all (`direct_shares`), costs

    exchange(B) = B · ((g_node − 1) / n / rate_node + (g_super − 1) g_node / n / rate_super
                       + (1 − 1 / g_net) / rate_net)                         `RankGroup.exchange`

Tokens go to experts by forms of their own (`dispatch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hyper_parallel.cluster.collective_cost import direct_shares, legs, reduce_scatter, send
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

    @cached_property
    def _radices(self) -> tuple[tuple[str, Array], ...]:
        """As of `Cluster.radices`, levels with one rank included."""
        return (("network", self.network), ("supernode", self.supernode), ("node", self.node))

    @cached_property
    def _rates(self) -> dict[str, Array]:
        return {"node": self.node_rate, "supernode": self.supernode_rate, "network": self.network_rate}

    def gather(self, bytes: Array) -> Array:
        """Seconds of an all-gather whose result has `bytes`, and of a reduce-scatter of `bytes`."""
        seconds = self.latency
        for leg in legs("reduce_scatter", bytes, self._radices):
            seconds = seconds + reduce_scatter(leg.ranks, leg.bytes, 0.0, self._rates[leg.level])
        return seconds

    def reduce(self, bytes: Array) -> Array:
        """Seconds of an all-reduce of `bytes` on each rank."""
        return 2 * self.gather(bytes)

    def exchange(self, bytes: Array) -> Array:
        """Seconds of an all-to-all in which each rank gives `bytes`."""
        each = {level: share / self._rates[level] for level, share in direct_shares(self._radices).items()}
        seconds: Array = each["node"] + each["supernode"] + each["network"]
        return bytes * seconds + self.latency

    def send(self, bytes: Array) -> Array:
        """Seconds of sending `bytes` to the next rank of the group, over the slowest level that it spans."""
        rate = np.where(
            self.network > 1,
            self.network_rate,
            np.where(self.supernode > 1, self.supernode_rate, self.node_rate),
        )
        wait = np.where(self.network > 1, self.net_hop, self.hop)
        seconds: Array = send(self.ranks, bytes, wait, rate)
        return np.where(self.ranks > 1, seconds, 0.0)

    @cached_property
    def latency(self) -> Array:
        """Seconds of a collective of nothing."""
        return self.hop * np.log2(self.node * self.supernode) + self.net_hop * np.log2(self.network)
