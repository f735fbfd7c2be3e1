"""Closed forms, exactly, flat and level by level."""

from __future__ import annotations

import numpy as np
import pytest
from traffic import crossing

from hyper_parallel.cluster import Cluster, CollectiveTable, Leg, Link
from hyper_parallel.cluster.collective_cost import BY_LEVELS, FORMS, direct_shares, form, legs
from hyper_parallel.errors import ConfigError

A, B = 2.0, 4.0  # seconds, bytes a second: sums of such numbers are exact
NODE = Link("node", bandwidth=8.0, latency=A, efficiency=0.5)
NETWORK = Link("network", bandwidth=1.0, latency=16.0)
FLAT = Cluster(links={"node": NODE})
TWO = Cluster(4, links={"node": NODE, "network": NETWORK})


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_reduce", 2 * 7 * (A + 64 / (8 * B))),
        ("all_gather", 7 * (A + 64 / B)),
        ("reduce_scatter", 7 * (A + 64 / (8 * B))),
        ("all_to_all", 7 * (A + 64 / (8 * B))),
        ("broadcast", 7 * A + 64 / B),
        ("reduce", 7 * A + 64 / B),
        ("gather", 7 * (A + 64 / B)),
        ("scatter", 7 * (A + 64 / (8 * B))),
        ("send", A + 64 / B),
        ("recv", A + 64 / B),
    ],
)
def test_of_eight_ranks_on_one_level(kind: str, seconds: float) -> None:
    assert FLAT.collective_seconds(kind, 64, 8) == seconds


def test_a_barrier_costs_latency_alone() -> None:
    assert FLAT.collective_seconds("barrier", 0, 8) == 14 * A


@pytest.mark.parametrize("kind", FORMS)
def test_nothing_is_sent_to_oneself(kind: str) -> None:
    assert FLAT.collective_seconds(kind, 64, 1) == FLAT.collective_seconds(kind, 64, [5]) == 0


def test_setup_is_added_once_a_call() -> None:
    link = Link("node", bandwidth=B, latency=A, setup=100)
    assert Cluster(links={"node": link}).collective_seconds("all_gather", 64, 8) == 100 + 7 * (A + 16)


@pytest.mark.parametrize(
    ("kind", "legs"),
    [
        (
            "all_reduce",
            [
                Leg("reduce_scatter", "node", 4, 64),
                Leg("all_reduce", "network", 3, 16),
                Leg("all_gather", "node", 4, 16),
            ],
        ),
        ("reduce_scatter", [Leg("reduce_scatter", "node", 4, 64), Leg("reduce_scatter", "network", 3, 16)]),
        ("all_gather", [Leg("all_gather", "network", 3, 64), Leg("all_gather", "node", 4, 192)]),
        ("all_to_all", [Leg("all_to_all", "node", 4, 64), Leg("all_to_all", "network", 3, 64)]),
    ],
)
def test_level_by_level(kind: str, legs: list[Leg]) -> None:
    assert TWO.legs(kind, 64, 12) == legs
    assert TWO.collective_seconds(kind, 64, 12) == sum(TWO.leg_seconds(leg) for leg in legs)


def test_an_all_reduce_over_three_levels_goes_in_and_out_again() -> None:
    cluster = Cluster(2, 4, links={level: Link(level, B, A) for level in ("node", "supernode", "network")})
    assert cluster.legs("all_reduce", 64, 8) == [
        Leg("reduce_scatter", "node", 2, 64),
        Leg("reduce_scatter", "supernode", 2, 32),
        Leg("all_reduce", "network", 2, 16),
        Leg("all_gather", "supernode", 2, 16),
        Leg("all_gather", "node", 2, 32),
    ]


class _Call:
    def __init__(self, leg: Leg, ranks: tuple[int, ...]) -> None:
        n = leg.ranks
        self.kind, self.ranks, self.bytes_in = leg.kind, ranks, int(leg.bytes)
        rounds = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1}
        self.bytes_received = int(leg.bytes * rounds.get(leg.kind, (n - 1) / n))


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_legs_send_what_traffic_counts(kind: str) -> None:
    """The bytes that cross between nodes: of the leg's closed form, and as `crossing` counts the same call."""
    (across,) = [leg for leg in TWO.legs(kind, 48, 12) if leg.level == "network"]
    counted = crossing([_Call(across, (0, 4, 8))], TWO, "node")
    free = Link("network", bandwidth=1.0, latency=0.0)
    seconds = Cluster(4, links={"node": NODE, "network": free}).leg_seconds(across)
    assert seconds == counted.bytes


def test_unequal_parts_and_the_flat_algorithm_run_over_the_slowest_link() -> None:
    assert TWO.legs("all_reduce", 64, [0, 1, 2, 4]) == [Leg("all_reduce", "network", 4, 64)]
    assert TWO.legs("all_reduce", 64, 8, "flat") == [Leg("all_reduce", "network", 8, 64)]
    assert TWO.legs("broadcast", 64, 8) == [Leg("broadcast", "network", 8, 64)]
    assert TWO.collective_seconds("all_reduce", 64, [0, 1, 2, 4]) == 2 * 3 * (16 + 64 / 4)


def test_measured_goes_before_the_closed_form() -> None:
    table = CollectiveTable("all_reduce", "node", 4, ((10, 1.0), (1000, 3.0)), A, B, 0.0)
    cluster = Cluster(links={"node": NODE}, collectives=(table,))
    assert cluster.collective_seconds("all_reduce", 10, 4) == 1
    assert cluster.collective_seconds("all_reduce", 1, 4) == 1  # never below the smallest call
    assert cluster.collective_seconds("all_reduce", 4000, 4) == 12  # at the largest call's rate
    assert cluster.collective_seconds("all_reduce", 64, 8) == 14 * (A + 64 / (8 * B))  # the fit's α and β
    assert cluster.collective_seconds("all_gather", 64, 8) == 7 * (A + 64 / B)


def test_what_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'all_gather'"):
        FLAT.collective_seconds("allgather", 1, 2)
    with pytest.raises(ConfigError, match="'levels' or 'flat'; got 'tree'"):
        FLAT.collective_seconds("all_reduce", 1, 2, "tree")
    with pytest.raises(ConfigError, match=r"no link 'network' \(it has node\); give links.network"):
        Cluster(4, links={"node": NODE}).collective_seconds("all_reduce", 1, 8)


# Arrays: the planner prices all its candidates at once with the same forms.


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
def test_arrays_cost_what_their_numbers_cost(kind: str) -> None:
    n, size = np.array([1.0, 3.0, 8.0]), np.array([5.0, 7.0, 64.0])
    together = FORMS[kind](n, size, A, B)  # type: ignore[arg-type]
    assert list(together) == [form(kind)(*pair, A, B) for pair in zip(n, size, strict=True)]


@pytest.mark.parametrize("kind", BY_LEVELS)
def test_a_level_of_one_rank_costs_nothing(kind: str) -> None:
    with_one = legs(kind, 64.0, [("network", 3.0), ("supernode", 1.0), ("node", 4.0)])
    without = legs(kind, 64.0, [("network", 3.0), ("node", 4.0)])
    assert sum(form(leg.kind)(leg.ranks, leg.bytes, A, B) for leg in with_one) == pytest.approx(
        sum(form(leg.kind)(leg.ranks, leg.bytes, A, B) for leg in without)
    )


def test_legs_of_arrays_leave_what_they_were_given_unchanged() -> None:
    size = np.array([64.0, 128.0])
    (inside, across) = legs(
        "reduce_scatter", size, [("network", np.array([2.0, 2.0])), ("node", np.array([4.0, 8.0]))]
    )
    assert list(inside.bytes) == list(size) == [64, 128]
    assert list(across.bytes) == [16, 16]


def test_an_exchange_gives_every_other_rank_its_share() -> None:
    shares = direct_shares([("network", 3.0), ("node", 4.0)])
    assert shares == {"node": 3 / 12, "network": 8 / 12}
