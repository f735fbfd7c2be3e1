"""Where axes lie: placement orders the ranks, what is wrong with it is said, what does not fit is reported."""

from __future__ import annotations

import doctest
import importlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hyper_parallel.cluster import Cluster, misplaced
from hyper_parallel.layout import Mesh
from hyper_parallel.strategy import AXIS_NAMES, LEVELS, Strategy


def _strategy(axes: dict, **placement: object) -> Strategy:  # type: ignore[type-arg]
    return Strategy.model_validate({"axes": axes, "placement": placement})


def test_the_levels_order_the_ranks_and_the_axes_order_a_level() -> None:
    strategy = _strategy(
        {"tensor_x": 4, "shard": 4, "replicate": 2, "context": 2, "tensor_y": 2},
        node=["tensor_y", "tensor_x"],
        supernode=["context", "shard"],
        network=["replicate"],
    )
    mesh = Mesh.of(strategy)
    assert mesh.names == ("replicate", "shard", "context", "tensor_x", "tensor_y")
    assert mesh.groups("tensor_y")[0] == (0, 1)
    assert Cluster.of(strategy) == Cluster(node=8, supernode=64)
    assert misplaced(strategy, Cluster.of(strategy)) == []
    # The experts fold over what is innermost now.
    assert dict(mesh.folds)["expert"].over == ("shard", "context", "tensor_x", "tensor_y")


def test_without_placement_nothing_changes() -> None:
    axes = {"tensor_x": 4, "shard": 4}
    assert Mesh.of(Strategy(axes=axes)).names == Mesh.of(_strategy(axes, devices={"node": 4})).names
    assert not Strategy(axes=axes).placement.given
    assert Cluster.of(Strategy(axes=axes)) == Cluster()


def test_tensor_is_tensor_x() -> None:
    strategy = _strategy({"tensor": 2, "shard": 2}, node=["tensor"], network=["shard"])
    assert strategy.axes.order[-1] == "tensor_x"


@st.composite
def placed(draw: st.DrawFn) -> Strategy:
    axes = {axis: draw(st.integers(1, 3)) for axis in draw(st.permutations(AXIS_NAMES))}
    level = {axis: draw(st.sampled_from(LEVELS)) for axis in axes}
    placement = {name: [a for a in draw(st.permutations(AXIS_NAMES)) if level[a] == name] for name in LEVELS}
    return _strategy(axes, **placement)


@given(placed())
def test_a_placed_strategy_reads_back_as_it_was_written(strategy: Strategy) -> None:
    again = Strategy.model_validate(strategy.model_dump(mode="json"))
    assert again == strategy
    assert Mesh.of(again) == Mesh.of(strategy)


@given(placed())
def test_axes_lie_on_the_levels_that_they_are_placed_on(strategy: Strategy) -> None:
    mesh, cluster = Mesh.of(strategy), Cluster.of(strategy)
    assert misplaced(strategy, cluster) == []
    for level in LEVELS:
        for axis in getattr(strategy.placement, level):
            for ranks in mesh.groups(axis):
                nodes = {cluster.island(rank, "node") for rank in ranks}
                supernodes = {cluster.island(rank, "supernode") for rank in ranks}
                assert len(nodes) == (1 if level == "node" else mesh.size(axis))
                assert len(supernodes) == (mesh.size(axis) if level == "network" and cluster.supernode else 1)


@given(placed(), st.integers(1, 6), st.integers(1, 3))
def test_the_radices_of_a_group_count_its_ranks_like_digits(
    strategy: Strategy, node: int, nodes: int
) -> None:
    mesh, cluster = Mesh.of(strategy), Cluster(node, node * nodes)
    for ranks in mesh.groups(mesh.storage):
        radices = cluster.radices(ranks)
        if radices is None:
            continue
        assert math.prod(size for _, size in radices) == len(ranks)
        assert tuple(level for level, _ in reversed(radices)) == cluster.spans(ranks)
        for position, rank in enumerate(ranks):
            # Members of one node are those that agree in all digits but the innermost, when that is the node's.
            inside = dict(radices).get("node", 1)
            assert cluster.island(rank, "node") == cluster.island(ranks[position // inside * inside], "node")


def test_an_axis_that_spans_levels_is_reported() -> None:
    sixteen = _strategy({"shard": 16}, node=["shard"], devices={"node": 8})
    assert misplaced(sixteen, Cluster.of(sixteen)) == [
        "shard (16) is placed on node but spans node 8 · network 2: its collectives run level by level"
    ]
    uneven = _strategy({"shard": 6}, node=["shard"], devices={"node": 4})
    assert misplaced(uneven, Cluster.of(uneven)) == [
        "shard (6) is placed on node but lies on node and network in unequal parts: its collectives run flat"
    ]
    roomy = _strategy({"shard": 2, "tensor": 2}, node=["tensor"], network=["shard"])
    assert misplaced(roomy, Cluster.of(roomy, local_world=4)) == [
        "shard (2) is placed on network but fits into node, and lies there"
    ]


def test_a_launcher_s_word_goes_before_the_degrees_and_the_file_s_before_both() -> None:
    strategy = _strategy({"shard": 4, "tensor": 4}, node=["tensor"], supernode=["shard"])
    assert Cluster.of(strategy) == Cluster(4, 16)
    assert Cluster.of(strategy, local_world=8) == Cluster(8, 16)
    stated = _strategy({"shard": 4, "tensor": 4}, node=["tensor"], network=["shard"], devices={"node": 2})
    assert Cluster.of(stated, local_world=8) == Cluster(2)


@pytest.mark.parametrize(
    ("axes", "placement", "said"),
    [
        ({"shard": 2, "tensor": 2}, {"node": ["tensor"]}, "leaves out shard"),
        ({"shard": 2}, {"node": ["shard"], "network": ["shard"]}, "placed twice, on node and network"),
        ({"shard": 2}, {"node": ["shard", "shard"]}, "placed twice, on node and node"),
        ({"shard": 2}, {"node": ["shrd"]}, "no axis is named 'shrd'; did you mean 'shard'?"),
        ({"shard": 2}, {"rack": ["shard"]}, "unknown key"),
        ({"shard": 2, "expert": 2}, {"node": ["shard", "expert"]}, "expert is not placed"),
        ({"shard": 2}, {"devices": {"node": 8, "supernode": 12}}, "not made of whole nodes of 8"),
        ({"shard": 2}, {"node": ["pipeline"]}, "pipeline is not placed: its stages lie outside"),
    ],
)
def test_what_is_wrong_is_said(axes: dict, placement: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValidationError, match=said.replace("?", r"\?")):
        _strategy(axes, **placement)


@pytest.mark.parametrize(
    "module", ["strategy.axes", "cluster.cluster", "cluster.collective_cost", "layout.layout", "layout.mesh"]
)
def test_examples_in_the_code_are_right(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"hyper_parallel.{module}"))
    assert found.attempted
    assert not found.failed
