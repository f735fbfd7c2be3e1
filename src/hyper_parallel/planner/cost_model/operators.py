"""Times of single operators, vectorized over configurations: matrix products and memory-bound kernels on one device,
collectives of a group of ranks, and the groups of each axis.

Collectives take the forms of `cluster.collective_cost` and the links' bandwidths of the cluster. The efficiencies and
latencies are corrections fitted on published runs (`planner.constants`): `inside` and `across` are the shares of the
bandwidth that collectives reach, `crowding` is what each doubling of nodes takes from a network whose paths nodes share
(`Link.shared_paths`), `hop` and `net_hop` are the latency of each doubling of ranks.

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

Tokens go to experts by forms of their own (`layer_collectives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hyper_parallel.cluster.collective_cost import direct_shares, legs, reduce_scatter, send
from hyper_parallel.planner.columns import ARCHITECTURES, ORDERS
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import in_eight_bits, in_four_bits, product_bytes
from hyper_parallel.planner.table import Array, Table

# Kernel times: matrix products and memory-bound operators on one device.
#
#     product(m, n, k) = max(2 m n k / (peak · r / ((1 + h_m s/m) (1 + h_n s/n) (1 + h_k s/k))),         `product`
#                            (w (m k + k n) + 2 m n) / (hbm · e))
#     bytes(B)         = B / (hbm · e) + B · i / instructions/s                                          `moved`
#
# r is the share of the peak that large products reach in a training step, by architecture, and on Hopper by who chooses
# their kernels (`large`); h are the sizes at which half of it is reached (Hockney's n_½, as in `cluster.efficiency`),
# and s = √(rate / 250 TFLOP/s), since a faster unit needs larger products to be as busy. The second term of the product
# is the roofline's memory side (Williams, Waterman and Patterson, CACM 52(4), 2009), with w bytes an operand's element,
# scales included, and results in 16 bits. e is the constant `memory`.
#
# An operator that moves bytes also converts, scales and addresses them, with i instructions a byte (`issue`) that wait
# for the bytes, so that both times add up. A B200 has 2.4 times the bandwidth of an H100 and issues 1.2 times as many
# instructions: its norms and permutations reach a smaller share of its bandwidth than an H100's. One i fits A100, H100
# and B200.


def large(t: Table, k: Constants) -> Array:
    """The share of the peak that large products reach, by architecture."""
    shares = {
        "volta": k.volta,
        "ampere": k.ampere,
        "hopper": k.hopper,
        "blackwell": k.blackwell,
        "blackwell-ultra": k.blackwell * k.ultra,
        "ascend": k.ascend,
    }
    of_code = np.array([shares.get(name, k.other) for name in ARCHITECTURES])
    return of_code[t.architecture.astype(np.intp)] * np.where(_is_hopper(t), k.first ** (1 - t.tuned), 1.0)


def _is_hopper(t: Table) -> npt.NDArray[np.bool_]:
    return np.asarray(t.architecture == ARCHITECTURES.index("hopper"))


def rate(t: Table, k: Constants, *, linear: bool = True) -> Array:
    """FLOP/s of large products; `linear`: in the precision of the linear layers, else in 16 bits."""
    share = large(t, k)
    sixteen = t.peak16 * share
    if not linear:
        return sixteen
    eight, four = in_eight_bits(t), in_four_bits(t)
    if not eight.any() and not four.any():
        return sixteen
    found = np.where(eight, t.peak8 * share * np.where(_is_hopper(t), k.eight_hopper, k.eight), sixteen)
    return np.where(four, t.peak4 * share * k.four, found)


class Products:
    """Products at one configuration each; what does not depend on their shape is computed once."""

    def __init__(self, t: Table, k: Constants, *, linear: bool = True) -> None:
        self.rate = rate(t, k, linear=linear)
        scale = np.sqrt(self.rate / 250e12)
        self.half = (k.half_rows * scale, k.half_columns * scale, k.half_depth * scale)
        self.bandwidth = t.hbm * k.memory
        few = linear and bool(in_eight_bits(t).any() or in_four_bits(t).any())
        self.operand = np.minimum(product_bytes(t), 2.0) if few else np.full(1, 2.0)

    def __call__(self, m: Array, n: Array, depth: Array) -> Array:
        """Seconds of [m, depth] · [depth, n]; 0 where a size is 0."""
        rows, columns, inner = self.half
        # m n k / share = (m + h_m) (n + h_n) (k + h_k): no division by a size that may be 0.
        flops = 2 * (m + rows) * (n + columns) * (depth + inner)
        bytes = 2 * m * n + self.operand * (n + m) * depth
        return np.where(m * n * depth > 0, np.maximum(flops / self.rate, bytes / self.bandwidth), 0.0)


def moved(t: Table, k: Constants, bytes: Array) -> Array:
    """Seconds of operators that read and write `bytes` in total."""
    return bytes * (1 / (t.hbm * k.memory) + k.issue / t.issue_rate)


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
        return cls.over(t, k, (ranks, inside))

    @classmethod
    def over(cls, t: Table, k: Constants, *axes: tuple[Array, Array]) -> RankGroup:
        """The ranks of several axes together, each with `ranks` and `inside`; other axes may lie between them."""
        node, supernode, network = np.ones(1), np.ones(1), np.ones(1)
        for ranks, inside in axes:
            here = np.clip(t.node / inside, 1, ranks)
            there = np.clip(t.supernode / (inside * here), 1, ranks / here)
            node, supernode, network = node * here, supernode * there, network * (ranks / (here * there))
        crowded = 1 + t.shared_paths * k.crowding * np.log2(np.maximum(network, 1.0))
        return cls(
            node,
            supernode,
            network,
            t.node_rate * k.inside,
            t.supernode_rate * k.inside,
            t.network_rate * k.across / crowded,
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


# Rank groups: the ranks of each axis, by the order of axes on the machine.
#
# An axis' neighbouring ranks have the product of the degrees of all axes inside it between them (`table.ORDERS`). The
# `expert` axis folds over the inner ones from the inside, outside of `expert_tensor`; an expert's gradients are reduced
# over what of data, context and tensor is left, the ranks of both apart.


@dataclass(frozen=True)
class Ranks:
    """The groups that a configuration's collectives run over."""

    t: Table
    k: Constants

    @cached_property
    def tensor(self) -> Array:
        """Ranks that split each matrix."""
        return self.t.tensor_x * self.t.tensor_y

    @cached_property
    def data(self) -> Array:
        """Ranks that see other rows."""
        return self.t.replicate * self.t.shard

    @cached_property
    def same(self) -> Array:
        """Ranks that hold, or share, the same parameters and see other tokens: data and context."""
        return self.data * self.t.context

    @cached_property
    def x(self) -> RankGroup:
        """The first tensor axis."""
        return self._group(self.t.tensor_x, "tensor_x")

    @cached_property
    def y(self) -> RankGroup:
        """The second tensor axis."""
        return self._group(self.t.tensor_y, "tensor_y")

    @cached_property
    def context(self) -> RankGroup:
        """Ranks that split positions."""
        return self._group(self.t.context, "context")

    @cached_property
    def stages(self) -> RankGroup:
        """The pipeline's stages."""
        return self._group(self.t.pipeline, "pipeline")

    @cached_property
    def experts(self) -> RankGroup:
        """Ranks over which experts are spread; those that split one expert's features lie between them."""
        return RankGroup.of(self.t, self.k, self.t.expert, self.t.expert_tensor)

    @cached_property
    def expert_tensor(self) -> RankGroup:
        """Ranks that split the features of each expert."""
        return RankGroup.of(self.t, self.k, self.t.expert_tensor, np.ones(1))

    @cached_property
    def of_experts(self) -> Array:
        """Ranks that hold one copy of a layer's experts together."""
        return self.t.expert * self.t.expert_tensor

    @cached_property
    def reducing(self) -> RankGroup:
        """Ranks that reduce the same gradients, experts' apart: data and context."""
        return RankGroup.over(self.t, self.k, self._contexts, (self.data, self._inside("data")))

    @cached_property
    def reducing_experts(self) -> RankGroup:
        """Ranks that reduce the same experts' gradients."""
        ranks = np.maximum(self.same * self.tensor / self.of_experts, 1.0)
        return RankGroup.of(self.t, self.k, ranks, self.of_experts)

    @cached_property
    def gathering(self) -> RankGroup:
        """Ranks that share one copy of the parameters: `shard` and `context`."""
        return RankGroup.over(self.t, self.k, self._contexts, (self.t.shard, self._inside("data")))

    @cached_property
    def copies(self) -> RankGroup:
        """Ranks that hold the same part of the parameters: `replicate`, outside of `shard`."""
        return RankGroup.of(self.t, self.k, self.t.replicate, self._inside("data") * self.t.shard)

    def _group(self, ranks: Array, axis: str) -> RankGroup:
        return RankGroup.of(self.t, self.k, ranks, self._inside(axis))

    @cached_property
    def _contexts(self) -> tuple[Array, Array]:
        """Ranks of `context`, and how many lie between neighbours."""
        return self.t.context, self._inside("context")

    @cached_property
    def _orders(self) -> list[tuple[tuple[str, ...], npt.NDArray[np.bool_]]]:
        """The orders that rows have, and which rows have each."""
        codes = np.flatnonzero(np.bincount(self.t.order.astype(np.intp)))
        return [(ORDERS[code], self.t.order == code) for code in codes]

    def _inside(self, axis: str) -> Array:
        """Ranks between neighbours of an axis: the product of the axes inside it."""
        degrees = {
            "tensor_x": self.t.tensor_x,
            "tensor_y": self.t.tensor_y,
            "context": self.t.context,
            "data": self.data,
            "pipeline": self.t.pipeline,
        }
        found: Array = np.ones(1)
        for order, rows in self._orders:
            inside: Array = np.ones(1)
            for other in order[: order.index(axis)]:
                inside = inside * degrees[other]
            found = inside if len(self._orders) == 1 else np.where(rows, inside, found)
        return found
