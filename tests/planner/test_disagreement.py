"""Where a simulated step and its estimate differ, and by what."""

from __future__ import annotations

import pytest

from hyper_parallel.planner.metrics import closed_classes, disagreement

ESTIMATED = {
    "products": 6.0,
    "attention": 2.0,
    "elementwise": 2.0,
    "tensor": 2.0,
    "gathers": 1.0,
    "fixed": 1.0,
}


def test_predictors_that_agree_have_nothing_to_name() -> None:
    simulated = {"products": 7.0, "attention": 2.0, "elementwise": 3.0, "all_reduce over tensor_x": 3.5}
    assert disagreement(simulated, ESTIMATED) is None
    assert disagreement(simulated, ESTIMATED, apart=0.1) is not None


def test_the_collective_that_takes_longer_is_named() -> None:
    simulated = {"products": 6.0, "attention": 2.0, "elementwise": 2.0}
    simulated |= {
        "all_gather over tensor_x": 4.0,
        "reduce_scatter over tensor_x": 3.0,
        "all_gather over shard": 1.0,
    }
    found = disagreement(simulated, ESTIMATED)
    assert found is not None
    assert (found.part, found.simulated, found.estimated) == ("all_gather over tensor_x", 7.0, 2.0)
    assert str(found) == "mostly all_gather over tensor_x: 7.00 s simulated, 2.00 s estimated"


def test_a_step_that_is_shorter_names_what_is_missing() -> None:
    found = disagreement({"products": 3.0, "attention": 2.5, "elementwise": 2.0}, ESTIMATED)
    assert found is not None
    assert (found.part, found.simulated, found.estimated) == ("products", 3.0, 6.0)


def test_what_is_computed_again_is_shared_out() -> None:
    plain = closed_classes(ESTIMATED)
    again = closed_classes({**ESTIMATED, "again": 5.0})
    assert again["products"] == pytest.approx(plain["products"] + 3.0)
    assert sum(again.values()) == pytest.approx(sum(plain.values()) + 5.0)
