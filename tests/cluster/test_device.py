"""What an operator takes: the roofline, and tables that are exact where they were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.cluster import Cluster, Device, Efficiency, MemoryTable, ShapeTable, Shared, Tier
from hyper_parallel.cluster.efficiency import Curve
from hyper_parallel.workload import Work

MEMORY = Tier("device", 1e9, read=100.0, write=50.0)


def device(**efficiency: object) -> Device:
    return Device("test", {"float32": 1000.0}, {"float32": 10.0}, MEMORY, 1.0, Efficiency(**efficiency))


def test_the_slower_of_arithmetic_and_memory_and_the_launch() -> None:
    bound_by_flops = Work("matmul", flops=4000, read=100, written=50)
    assert device().seconds(bound_by_flops) == 1 + 4
    bound_by_bytes = Work("elementwise", vector_flops=10, read=100, written=50)
    assert device().seconds(bound_by_bytes) == 1 + 1 + 1
    assert device().seconds(Work("host")) == 1


def test_a_share_by_shape_stretches_the_arithmetic() -> None:
    table = ShapeTable(best=0.5, half=(10.0, 0.0, 0.0))
    work = Work("matmul", flops=1000, shape=(1, 10, 8, 8))
    assert device(matmul=(table,)).seconds(work) == 1 + 1 / 0.25


def test_attention_is_priced_by_its_own_flops() -> None:
    shape = (1, 2, 8, 8, 4)
    for layout, flops in (("forward", 2048), ("backward", 5120), ("forward causal", 1024)):
        assert device().compute_seconds(Work("attention", shape=shape, layout=layout)) == flops / 1000


def test_an_operator_that_was_measured_by_name_goes_before_its_kind() -> None:
    kind = MemoryTable("elementwise", points=((1.0, 0.5),))
    name = MemoryTable(op="aten.exp", launch=3.0, points=((1.0, 0.25),))
    strided = MemoryTable("elementwise", layout="strided", points=((1.0, 0.125),))
    found = device(memory=(kind, name, strided))
    assert found.seconds(Work("elementwise", read=100)) == 1 + 2
    assert found.seconds(Work("elementwise", read=100, op="aten.exp.default")) == 3 + 4
    # Its arithmetic is within what was measured.
    assert found.seconds(Work("elementwise", vector_flops=1e6, read=100, op="aten.exp.default")) == 3 + 4
    assert found.seconds(Work("elementwise", read=100, layout="strided")) == 1 + 8


def test_an_operator_that_computes_in_another_way_has_its_own_figure_and_else_that_of_its_name() -> None:
    name = MemoryTable(op="aten.gelu", points=((1.0, 0.5),))
    tanh = MemoryTable(op="aten.gelu", layout="tanh", points=((1.0, 0.25),))
    asked = Work("elementwise", read=100, op="aten.gelu.default", layout="tanh")
    assert device(memory=(name, tanh)).seconds(asked) == 1 + 4
    assert device(memory=(name,)).seconds(asked) == 1 + 2


def test_new_memory_costs_its_first_touch() -> None:
    found = device(fresh=((10.0, 0.5), (1000.0, 0.5)))
    assert found.seconds(Work("copy", read=100, written=50, fresh=50)) == 1 + 2 + 2


def test_a_slowed_device_takes_that_much_longer_at_everything() -> None:
    found = device(memory=(MemoryTable("copy", launch=2.0),), fresh=((1.0, 0.5),))
    for work in (Work("matmul", flops=4000), Work("copy", read=100, fresh=10), Work("host")):
        assert found.slowed(3).seconds(work) == pytest.approx(3 * found.seconds(work))


def test_workers_that_share_the_cores_are_slower() -> None:
    alone = device()
    cluster = Cluster(device=alone, shared={2: Shared(alone.slowed(2)), 4: Shared(alone.slowed(5))})
    work = Work("matmul", flops=1000)
    times = [cluster.for_workers(n).device.seconds(work) for n in (1, 2, 3, 4, 8)]  # type: ignore[union-attr]
    assert times == [2, 4, 10, 10, 20]
    assert cluster.for_workers(4).device.memory.ranks == 4  # type: ignore[union-attr]


POINTS = st.lists(
    st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=1, max_size=6, unique_by=lambda p: p[0]
)


@given(POINTS, st.floats(0.5, 2e9))
def test_a_curve_is_exact_at_its_points_and_between_its_neighbours(
    points: list[tuple[float, float]], x: float
) -> None:
    curve = Curve(tuple(sorted(points)))
    assert all(curve.at(size) == value for size, value in points)
    below = [value for size, value in curve.points if size <= x][-1:]
    above = [value for size, value in curve.points if size >= x][:1]
    around = [*below, *above]
    assert min(around) * (1 - 1e-9) <= curve.at(x) <= max(around) * (1 + 1e-9)


@given(POINTS, st.floats(1, 1e9), st.floats(1, 1e9))
def test_a_curve_rises_where_its_points_rise(points: list[tuple[float, float]], x: float, y: float) -> None:
    sizes, values = zip(*points, strict=True)
    curve = Curve(tuple(zip(sorted(sizes), sorted(values), strict=True)))
    assert curve.at(min(x, y)) <= curve.at(max(x, y)) * (1 + 1e-9)


@given(
    st.lists(
        st.tuples(*[st.integers(1, 4096).map(float)] * 4, st.floats(0.01, 1)),
        min_size=1,
        max_size=6,
        unique_by=lambda row: row[:4],
    )
)
def test_a_table_of_shapes_is_exact_at_its_points(
    points: list[tuple[float, float, float, float, float]],
) -> None:
    table = ShapeTable(best=0.8, half=(16.0, 4.0, 64.0), points=tuple(points))
    for *shape, share in points:
        assert table.share(shape) == pytest.approx(share, rel=1e-9)
    assert table.share((3, 5000, 5000, 5000)) <= max(share for *_, share in points)


def test_the_smooth_curve_rises_with_every_dim() -> None:
    table = ShapeTable(best=0.8, half=(16.0, 4.0, 64.0))
    shares = [table.share((1, m, n, k)) for m, n, k in ((16, 4, 64), (32, 4, 64), (32, 8, 64), (32, 8, 128))]
    assert shares[0] == pytest.approx(0.1)
    assert shares == sorted(shares)
