"""From seconds to tables: what is put in comes out."""

from __future__ import annotations

import pytest

from hyper_parallel.calibrate import device, run
from hyper_parallel.calibrate.measure import fit as fit_collective
from hyper_parallel.calibrate.measure import group_sizes
from hyper_parallel.calibrate.timing import Results, averaged
from hyper_parallel.cluster.collective_cost import FORMS, form
from hyper_parallel.cluster.device import CopyTable


@pytest.mark.parametrize("kind", sorted(set(FORMS) - {"barrier"}))
def test_the_fit_finds_the_latency_and_bandwidth_of_a_closed_form(kind: str) -> None:
    points = {size: form(kind)(4, size, 2e-5, 3e9) for size in (2**10, 2**17, 2**24)}
    latency, bandwidth, residual = fit_collective(kind, 4, points)
    assert latency == pytest.approx(2e-5, rel=1e-6)
    assert bandwidth == pytest.approx(3e9, rel=1e-6)
    assert residual < 1e-6


def test_without_latency_the_fit_is_the_best_bandwidth() -> None:
    points = {2**10: 1e-7, 2**20: 1e-2, 2**21: 3e-2}

    closed = form("all_reduce")

    def off(bandwidth: float) -> float:
        return sum((closed(4, size, 0.0, bandwidth) / seconds - 1) ** 2 for size, seconds in points.items())

    latency, bandwidth, residual = fit_collective("all_reduce", 4, points)
    assert latency == 0
    errors = [abs(closed(4, size, 0.0, bandwidth) / seconds - 1) for size, seconds in points.items()]
    assert residual == pytest.approx(sum(errors) / len(errors))
    assert off(bandwidth) < min(off(bandwidth * 1.01), off(bandwidth / 1.01))


def test_without_a_bandwidth_in_sight_the_fit_still_has_one() -> None:
    latency, bandwidth, _ = fit_collective("all_reduce", 4, {2**10: 1e-4, 2**20: 1e-5})
    assert latency > 0
    assert bandwidth > 0


def test_a_table_of_products_gives_back_the_measured_seconds() -> None:
    points = {
        (1.0, m, 64.0, 64.0): 1e-6 + 2 * m * 64 * 64 / (1e9 * m / (m + 32)) for m in (64.0, 256.0, 1024.0)
    }
    flops = {shape: 2 * shape[1] * 64 * 64 for shape in points}
    peak = device.peak_of(points, flops, 1e-6)
    table = device.shape_table(points, flops, peak, 1e-6, "float32", "nn", 0.01)
    for shape, seconds in points.items():
        assert 1e-6 + flops[shape] / (peak * table.share(shape)) == pytest.approx(seconds, rel=1e-4)


def test_a_table_of_bytes_takes_the_launch_from_the_smallest_sizes() -> None:
    points = {size: 3e-6 + size / 1e10 for size in (1e4, 1e6, 1e7)}
    table = device.memory_table(points, 2e10, 0.0, kind="copy", op="", dtype="", layout="")
    assert table.launch == pytest.approx(3e-6, rel=1e-4)
    assert [share for _, share in table.points] == pytest.approx([0.5, 0.5, 0.5], rel=1e-3)


def test_a_tier_has_both_directions() -> None:
    out = CopyTable("device", "host", ((1e6, 1e-3),))
    back = CopyTable("host", "device", ((1e6, 5e-4), (4e6, 1e-3)))
    tier = run._tier("host", 1e9, "device", (out, back))
    assert tier is not None and (tier.read, tier.write) == (4e9, 1e9)
    assert run._tier("host", 1e9, "device", (out,)) is None


def test_workers_are_averaged_and_what_only_some_measured_is_left_out() -> None:
    one, two = Results(), Results()
    one.add(("a",), 1.0, 0.1)
    one.add(("b",), 1.0, 0.1)
    two.add(("a",), 4.0, 0.3)
    merged = averaged([one, two])
    assert merged.seconds == {("a",): 2.0}
    assert merged.spreads[("a",)] == pytest.approx(0.2)


def test_groups_are_the_world_and_its_halves() -> None:
    assert group_sizes(8) == [8, 4, 2]
    assert group_sizes(6) == [6, 3]
    assert group_sizes(2) == [2]
