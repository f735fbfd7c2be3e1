"""Machines on PCI Express: devices without peer-to-peer, and roots of a node, as simulator and planner price them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.traces import Ops, times, toy, trace
from hyper_parallel.cluster import Cluster, Link, Tier
from hyper_parallel.cluster.cluster import THROUGH_HOST
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.constants import constants_for, fitted
from hyper_parallel.planner.framework_profiles import GENERIC, HYPER_PARALLEL
from hyper_parallel.planner.table import of_cluster
from hyper_parallel.simulator import simulate
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.trace import Collective

LANES = 31.5e9
DEVICE = Cluster.preset("rtx4090").device
HOST = Tier("host", 1e12, 4e11, 4e11, ranks=8)
LINKS = {
    "node": Link("node", LANES, 5e-6, 0.8),
    "network": Link("network", 1e9, 1e-5),
    "host": Link("host", LANES, 1e-5, 0.6),
}
DIRECT = Cluster(node=8, device=DEVICE, links=LINKS, host=HOST)
THROUGH = replace(DIRECT, peer_to_peer=False)


def test_a_byte_without_peer_to_peer_is_written_to_the_host_and_read_there() -> None:
    assert DIRECT.link("node").reached == 0.8 * LANES
    # The slowest of the device's link, its link to the host, and an eighth of what the host writes and reads.
    assert THROUGH.link("node").reached == pytest.approx(THROUGH_HOST * 4e11 / 16)
    wide = replace(THROUGH, host=replace(HOST, read=4e12, write=4e12))
    assert wide.link("node").reached == pytest.approx(0.6 * LANES)
    assert (
        replace(wide, links={**LINKS, "host": Link("host", 1e12, 1e-5)}).link("node").reached == 0.8 * LANES
    )
    more = replace(THROUGH, host=replace(HOST, ranks=16))
    assert more.link("node").reached == pytest.approx(THROUGH.link("node").reached / 2)
    assert THROUGH.link("network") == DIRECT.link("network")
    assert THROUGH.link("host") == DIRECT.link("host")
    assert THROUGH.copy_seconds("device", "host", 1e9) == DIRECT.copy_seconds("device", "host", 1e9)


def test_the_measured_rate_of_eight_rtx_5090() -> None:
    found = Cluster.preset("rtx5090").link("node").reached
    assert found == pytest.approx(28e9, rel=0.02)


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
)
def test_collectives_within_a_node_are_slower_without_peer_to_peer(kind: str) -> None:
    for ranks in (2, 8):
        direct, through = (cluster.collective_seconds(kind, 1e8, ranks) for cluster in (DIRECT, THROUGH))
        assert through > 1.3 * direct
    apart = (0, 8)
    assert THROUGH.collective_seconds(kind, 1e8, apart) == DIRECT.collective_seconds(kind, 1e8, apart)


def test_the_planner_takes_the_rate_that_the_simulator_takes() -> None:
    for cluster in (DIRECT, THROUGH):
        rate = of_cluster(cluster)["node_rate"] * constants_for(HYPER_PARALLEL, cluster).inside
        assert rate == pytest.approx(cluster.link("node").reached)
    assert constants_for(GENERIC, THROUGH) == fitted()
    assert of_cluster(THROUGH)["node_rate"] < of_cluster(DIRECT)["node_rate"]
    for name in ("host_rate", "host_bytes", "network_rate", "hbm"):
        assert of_cluster(THROUGH)[name] == of_cluster(DIRECT)[name]


def test_collectives_through_the_host_take_of_the_links_that_copies_take() -> None:
    call = Collective("all_gather", tuple(range(8)), 10**8)
    [leg] = Costs(THROUGH).legs(call)
    share = THROUGH.link("node").reached / THROUGH.link("host").reached
    assert dict(leg.uses) == {"link:node": 1.0, "to:host": share, "from:host": share}
    assert dict(Costs(DIRECT).legs(call)[0].uses) == {"link:node": 1.0}
    [leg] = Costs(THROUGH).legs(replace(call, kind="send", ranks=(0, 1)))
    assert set(dict(leg.uses)) == {"link:node", "to:host"}
    [leg] = Costs(THROUGH).legs(replace(call, kind="send", ranks=(0, 8)))
    assert set(dict(leg.uses)) == {"link:network"}


def test_a_copy_beside_a_collective_through_the_host_is_slower() -> None:
    direct = toy()
    direct = replace(direct, links={**direct.links, "host": Link("host", 1.0, 0.0)})
    through = replace(direct, peer_to_peer=False)

    def copied(cluster: Cluster, route: str, kind: str) -> float:
        ops = Ops()
        ops.send("sent", 100, (0, 1), kind=kind)
        ops.copy("copied", 6, route)
        return times(simulate(trace(ops), cluster))["copied"][1]

    share = THROUGH_HOST / (1 / 2 + 1)
    for route in ("device>host", "host>device"):
        assert copied(direct, route, "all_to_all") == 6
        # Of the link, the collective takes a share at the rate at which both go on.
        assert copied(through, route, "all_to_all") == pytest.approx(6 * (1 + share))
    # What is sent takes of the way to the host alone.
    assert copied(through, "device>host", "send") == pytest.approx(6 * (1 + share))
    assert copied(through, "host>device", "send") == 6


ROOTS = replace(
    DIRECT,
    root=4,
    links={**LINKS, "root": Link("root", LANES, 2e-6, 0.8), "node": Link("node", 8e9, 5e-6, 0.8)},
)


def test_a_collective_of_a_node_with_roots_crosses_between_them_once() -> None:
    assert ROOTS.levels == ("root", "node", "network")
    assert ROOTS.radices(range(16)) == (("network", 2), ("node", 2), ("root", 4))
    assert ROOTS.spans(range(4)) == ("root",)
    assert ROOTS.spans((0, 4)) == ("node",)
    legs = ROOTS.legs("all_reduce", 4e8, 8)
    assert [(leg.level, leg.ranks, leg.bytes) for leg in legs] == [
        ("root", 4, 4e8),
        ("node", 2, 1e8),
        ("root", 4, 1e8),
    ]
    below, between = (ROOTS.collective_seconds("all_reduce", 1e8, ranks) for ranks in ((0, 1), (0, 4)))
    assert between > 3 * below


def test_the_planner_prices_roots_and_nodes() -> None:
    columns = of_cluster(ROOTS)
    assert (columns["node"], columns["supernode"]) == (4, 8)
    assert (columns["node_rate"], columns["supernode_rate"], columns["network_rate"]) == (LANES, 8e9, 1e9)
    through = replace(ROOTS, peer_to_peer=False)
    assert of_cluster(through)["node_rate"] == pytest.approx(THROUGH_HOST * 4e11 / 16)
    assert of_cluster(through)["supernode_rate"] == pytest.approx(0.8 * 8e9)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            "peer_to_peer: false",
            "mine.yaml: peer_to_peer: false: what devices send passes .*give host and links.host",
        ),
        ("node: 8\nroot: 3", "mine.yaml: root: 3 devices below a root do not divide a node of 8"),
        ("root: 4", "mine.yaml: root: 4 devices below a root do not divide a node of None"),
        ("node: 8\nroot: 4\nsupernode: 16", "mine.yaml: root and supernode: "),
        ("peer_to_peer: maybe", "mine.yaml: peer_to_peer: .*valid boolean"),
        ("per_to_peer: false", "mine.yaml: per_to_peer: unknown key; did you mean 'peer_to_peer'"),
    ],
)
def test_what_cannot_be_is_refused(lines: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{lines}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        Cluster.load(path)
