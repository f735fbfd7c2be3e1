"""Bytes of tokens on their way to experts: counted by hand, and priced on a cluster."""

from __future__ import annotations

from itertools import product

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.collective_cost import TokenDispatch
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.trace import Collective

RADICES = [("network", 4), ("node", 2)]


def test_bytes_are_those_of_copies_drawn_one_by_one() -> None:
    """Every choice of 2 ranks of 8 with equal probability: copies that leave the node, and copies within a node."""
    sent = {"network": 0.0, "node": 0.0}
    choices = list(product(range(8), repeat=2))
    for ranks in choices:
        nodes = {rank // 2 for rank in ranks}
        sent["network"] += len(nodes - {0}) / len(choices)
        # Into each node the token comes on one rank, from which it goes to the other if that one needs it.
        sent["node"] += sum(rank % 2 for rank in set(ranks)) / len(choices)
    found = TokenDispatch(2).bytes(2.0, RADICES)
    assert found == pytest.approx(sent)


def test_groups_of_experts_keep_a_token_on_few_nodes() -> None:
    free, limited = TokenDispatch(8).bytes(8.0, RADICES), TokenDispatch(8, 4, 1).bytes(8.0, RADICES)
    assert limited["network"] == pytest.approx(1 - 1 / 4)
    assert free["network"] > 2 * limited["network"]


def test_an_exchange_costs_less_with_one_copy_and_others_cost_the_same() -> None:
    cluster = Cluster.named("h100x64")
    call = Collective("all_to_all", tuple(range(64)), 10**9, "expert", "expert")
    other = Collective("all_to_all", call.ranks, 10**9, "context", "context")
    plain, once = Costs(cluster, None, 64), Costs(cluster, TokenDispatch(8, 8, 4), 64)
    half = Costs(cluster, TokenDispatch(8, 8, 4, share=0.5), 64)
    assert once.collective_seconds(call) < 0.6 * plain.collective_seconds(call)
    mean = (once.collective_seconds(call) + plain.collective_seconds(call)) / 2
    assert half.collective_seconds(call) == pytest.approx(mean)
    assert once.collective_seconds(other) == plain.collective_seconds(other)
    network = 10**9 / 8 * 4 * (1 - 0.75**8) * 7 / 8 / cluster.link("network").reached
    assert once.collective_seconds(call) == pytest.approx(network, rel=0.01)
