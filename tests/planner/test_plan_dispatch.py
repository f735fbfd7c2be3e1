"""Dispatch of tokens to experts: limits and orders of the form, published exchanges, and what is open."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import SCHEDULES, Profile
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.layer_collectives import (
    copies,
    destinations,
    exchanged_experts,
    reached,
)
from hyper_parallel.planner.cost_model.memory import memory
from hyper_parallel.planner.cost_model.operators import Ranks
from hyper_parallel.planner.cost_model.step import estimate, open_facts
from hyper_parallel.planner.csv_runs.model_and_machine import network_rate
from hyper_parallel.planner.csv_runs.rows import rows
from hyper_parallel.planner.error_interval import between
from hyper_parallel.planner.framework_profiles import HYPER_PARALLEL, MEGATRON_LM
from hyper_parallel.planner.table import Table, sum_of
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

NO_WAIT = Constants(hop=0.0, net_hop=0.0)
FREE = np.zeros(1)


def table(
    model: str | Shape = "qwen3-235b-a22b",
    cluster: str = "h100x256",
    profile: Profile = HYPER_PARALLEL,
    **spread: Any,
) -> Table:
    spread = {"shard": 32.0, "expert": 32.0, **spread}
    shaped = shape(model) if isinstance(model, str) else model
    return Table.of(Workload(shaped, 64, 4096), Cluster.named(cluster), profile, **spread)


def seconds(t: Table, k: Constants = NO_WAIT, compute: float = 0.0) -> float:
    tokens = t.micro * t.sequence / t.context
    found = exchanged_experts(t, k, Ranks(t, k), tokens, np.array([compute]))
    return float(found[0])


def over_network(t: Table) -> tuple[float, float]:
    """Rows of a token that cross the network: one for each expert, and one for each node."""
    plain, once = copies(t, Ranks(t, NO_WAIT))
    return float(plain[0][0]), float(once[0][0])


def test_experts_of_one_node_send_nothing_over_the_network() -> None:
    assert over_network(table(expert=8.0)) == (0.0, 0.0)
    slower = table(expert=8.0)
    assert seconds(slower) == seconds(slower.replaced(network_rate=1.0))
    assert seconds(table(expert=1.0)) == 0.0


def test_all_to_alls_and_dispatch_reach_shares_of_their_own() -> None:
    """The network decides here; rings' share has no part in either."""
    plain, once = table(), table().replaced(dedup=1.0)
    slow, ring = replace(NO_WAIT, scattered=NO_WAIT.scattered / 2), replace(NO_WAIT, across=0.1)
    assert seconds(plain, slow) == pytest.approx(2 * seconds(plain))
    assert seconds(once, slow) == seconds(once)
    assert seconds(plain, ring) == seconds(plain)


def test_a_rack_of_72_is_one_domain() -> None:
    rack = table(cluster="gb200-nvl72", shard=64.0, expert=64.0)
    assert over_network(rack) == (0.0, 0.0)
    assert min(over_network(table(shard=64.0, expert=64.0))) > 0


@pytest.mark.parametrize("expert", [8.0, 16.0, 32.0, 64.0, 128.0])
@pytest.mark.parametrize("model", ["qwen3-235b-a22b", "deepseek-v3", "mixtral-8x7b", "gpt-oss-120b"])
def test_one_row_a_node_is_never_more_than_one_an_expert(model: str, expert: float) -> None:
    plain, once = over_network(table(model, shard=expert, expert=expert))
    assert once <= plain * (1 + 1e-12)


def test_a_group_limit_never_sends_more() -> None:
    unlimited = replace(shape("deepseek-v3"), expert_groups=0, chosen_groups=0)
    for expert in (16.0, 32.0, 64.0, 128.0, 256.0):
        spread = {"shard": expert, "expert": expert, "dedup": 1.0}
        limited = table("deepseek-v3", **{k: v for k, v in spread.items() if k != "dedup"}).replaced(
            dedup=1.0
        )
        free = table(unlimited, shard=expert, expert=expert).replaced(dedup=1.0)
        assert over_network(limited)[1] <= over_network(free)[1] * (1 + 1e-12)
        assert seconds(limited) <= seconds(free) * (1 + 1e-12)


def test_deepseek_reaches_four_of_eight_nodes() -> None:
    """Each of eight nodes holds one of the groups, of which a token chooses four (arXiv 2412.19437, section 2.1.2)."""
    eight, four = np.array([8.0]), np.array([4.0])
    assert reached(eight, four, eight)[0] == pytest.approx(4.0)
    # Two groups on each of four nodes: a node is missed where both of its groups are.
    by_hand = 4 * (1 - math.comb(6, 4) / math.comb(8, 4))
    assert reached(eight, four, four)[0] == pytest.approx(by_hand)
    # A group on two nodes each.
    assert reached(eight, four, np.array([16.0]))[0] == pytest.approx(8.0)
    assert reached(np.zeros(1), np.zeros(1), eight)[0] == 8.0


def test_destinations_are_counted_as_drawn_at_random() -> None:
    drawn = np.random.default_rng(0).integers(0, 8, size=(20000, 6))
    counted = np.mean([len(set(row)) for row in drawn])
    assert destinations(np.array([8.0]), np.array([6.0]))[0] == pytest.approx(counted, rel=0.01)


def test_dispatch_in_eight_bits_halves_one_of_two_directions() -> None:
    wide, narrow = table(), table().replaced(dispatch_bytes=1.0)
    assert seconds(narrow) == pytest.approx(0.75 * seconds(wide))


def test_exchanges_grow_with_the_load_of_the_fullest_rank() -> None:
    times = [seconds(table(), Constants(imbalance=load)) for load in (1.0, 1.2, 1.5)]
    assert times == sorted(times) and times[0] < times[-1]
    even = table().replaced(even=1.0)
    assert seconds(even, Constants(imbalance=1.5)) == seconds(even, Constants(imbalance=1.0))


def test_overlap_hides_no_more_than_there_is_to_compute() -> None:
    behind = table().replaced(overlap_expert=1.0, ordered=0.0)
    k = replace(NO_WAIT, hidden_expert=0.5)
    whole = seconds(table(), k)
    assert seconds(behind, k, compute=0.0) == pytest.approx(whole)
    assert seconds(behind, k, compute=1e9) == pytest.approx(0.5 * whole)
    dual = table(schedule=float(SCHEDULES.index("dualpipe")))
    assert seconds(dual, k, compute=1e9) == pytest.approx(0.0)
    assert seconds(dual, k, compute=whole / 3) == pytest.approx(whole / 2)


def test_splitting_features_of_experts_gathers_their_rows() -> None:
    """Experts of 8 ranks by 4: neighbours split features, so that 8 ranks of experts lie on 4 nodes."""
    whole = table("mixtral-8x7b", tensor_x=4.0, shard=8.0, expert=8.0)
    split = whole.replaced(expert_tensor=4.0)
    assert over_network(whole)[0] == 0 and over_network(split)[0] == pytest.approx(2 * 3 / 4)
    assert seconds(split) > seconds(whole)
    assert memory(split)["parameters"][0] < memory(whole)["parameters"][0]
    held, layers = shape("mixtral-8x7b"), 32
    experts = 3 * held.hidden * held.expert_ffn * layers * whole.weight_bytes[0]
    apart = memory(whole)["parameters"][0] - memory(split)["parameters"][0]
    assert apart == pytest.approx(experts * (1 - 1 / 4))


@pytest.mark.parametrize(("expert", "published"), [(32.0, 58.0), (64.0, 51.0)])
def test_exchanges_of_deepep(expert: float, published: float) -> None:
    """DeepEP's README: 4,096 tokens of 7,168 elements, 8 of 256 experts in at most 4 nodes, on H800 with 400 Gb/s.

    It states GB/s of rows to nodes, the own one counted. Within 15% of them.
    """
    t = table("deepseek-v3", cluster="h800x64", shard=expert, expert=expert).replaced(dedup=1.0, even=1.0)
    within = reached(t.expert_groups, t.chosen_groups, np.array([expert / 8]))
    to_nodes = destinations(within, np.array([8.0]))[0]
    both_ways = seconds(t)
    rate = 2 * 4096 * 7168 * 2 * to_nodes / both_ways
    assert rate == pytest.approx(published * 1e9, rel=0.15)


def test_what_is_open_is_within_the_interval() -> None:
    """A source that does not say how tokens are dispatched gets the interval of both."""
    t = table(profile=MEGATRON_LM)
    told = estimate(t, fitted())
    sides = [
        sum_of(estimate(t.replaced(dedup=d, overlap_expert=o, even=e, fused_routing=f), fitted()).parts)[0]
        for d in (0.0, 1.0)
        for o in (0.0, 1.0)
        for e in (0.0, 1.0)
        for f in (0.0, 1.0)
    ]
    assert told.fastest[0] == pytest.approx(min(sides)) and told.slowest[0] == pytest.approx(max(sides))
    assert told.fastest[0] < told.seconds[0] < told.slowest[0]
    low, high = between(t, told)
    assert low[0] < min(sides) and high[0] > max(sides)
    known = table()
    assert open_facts(known, fitted(), np.array([3.0])) == (3.0, 3.0)


RUN = {
    "model": "qwen3-235b-a22b",
    "seq_len": "4096",
    "hardware": "H100",
    "n_devices": "256",
    "precision": "bf16",
    "tp": "2",
    "pp": "8",
    "ep": "32",
    "mbs": "1",
    "gbs": "2048",
}


def facts(**cells: str) -> Table:
    found, told = rows([RUN | cells])
    assert not told[0].unsupported, told[0].unsupported
    return found


def test_rows_say_how_they_dispatch() -> None:
    assert facts(framework="Megatron-LM").dedup[0] == 0.5
    assert facts(framework="Megatron-LM, DeepEP").dedup[0] == 1
    assert facts(framework="Megatron-LM", notes="alltoall dispatcher").dedup[0] == 0
    said = facts(framework="Megatron-LM", notes="DeepEP, 1F1B overlap, force balance; 19.7 s")
    assert (said.dedup[0], said.overlap_expert[0], said.even[0]) == (1, 1, 1)
    rack = facts(framework="Megatron-Bridge NeMo 26.04", hardware="GB200-NVL72")
    assert (rack.dedup[0], rack.overlap_expert[0], rack.even[0]) == (1, 0, 1)
    assert facts(framework="Megatron-Bridge NeMo 26.04").dedup[0] == 0.5
    assert facts(framework="Megatron-LM", notes="etp=2", ep="16").expert_tensor[0] == 2
    assert facts(framework="NeMo 24.07", tp="4", ep="4").expert_tensor[0] == 4
    assert facts(framework="Megatron-LM").balanced[0] == 0
    assert facts(framework="Megatron-LM", notes="DeepEP; loss in split").balanced[0] == 1


def test_a_rate_in_bytes_is_eight_times_one_in_bits() -> None:
    assert network_rate("InfiniBand 8x50 GB/s", 8) == network_rate("8x400G NIC per node", 8) == 50e9
    assert network_rate("400 GB/s per node", 8) == 50e9 and network_rate("400 Gb/s per node", 8) == 6.25e9
    assert network_rate("3.2 Tb/s per node", 8) == network_rate("50 GB/s per GPU", 8) == 50e9
    assert network_rate("NVLink 900 GB/s per GPU; 400 Gb/s per GPU", 8) == 50e9
    assert network_rate("NVLink 900 GB/s per GPU", 8) is None
