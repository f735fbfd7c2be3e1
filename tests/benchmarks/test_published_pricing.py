"""What a framework's profile says of a published run's step, as it is priced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from published_machine import CAPTURED_ROUTING, grouped_launches, products
from published_pricing import Pricing

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import ARCHITECTURES
from hyper_parallel.planner.constants import Constants


def _row(**columns: float) -> Any:
    """A table of one row with these columns."""
    plain = {
        "fused": 1.0,
        "logit_bytes": 8.0,
        "expert": 1.0,
        "dedup": 0.0,
        "chosen": 2.0,
        "fused_routing": 0.0,
    }
    plain |= {"expert_groups": 0.0, "chosen_groups": 0.0, "tuned": 1.0}
    return SimpleNamespace(**{name: np.array([value]) for name, value in (plain | columns).items()})


def test_a_framework_that_fuses_some_operators_is_not_priced_as_one_that_fuses_all() -> None:
    some = Pricing.of(_row(fused=0.5), "megatron-deepspeed", recompute=False)
    assert not some.fused and Pricing.of(_row(), "megatron-lm", recompute=False).fused


def test_layers_are_computed_again_as_a_whole_where_the_framework_does_so() -> None:
    assert Pricing.of(_row(), "megatron-lm", recompute=True).recomputes_whole
    assert not Pricing.of(_row(), "megatron-lm", recompute=False).recomputes_whole
    assert not Pricing.of(_row(), "torchtitan", recompute=True).recomputes_whole


def test_a_token_is_sent_once_only_where_experts_are_spread_and_the_framework_does_so() -> None:
    assert Pricing.of(_row(dedup=1.0), "megatron-lm", recompute=False).dispatch is None
    sent = Pricing.of(_row(dedup=0.5, expert=8.0), "megatron-lm", recompute=False).dispatch
    assert sent is not None and sent.share == 0.5


def test_launches_of_a_product_of_experts_are_those_of_the_closed_forms_less_what_is_captured() -> None:
    known = Constants(routing=230.0)
    for fused_routing, launches in ((0.0, 230.0), (1.0, 115.0)):
        found = grouped_launches(_row(fused_routing=fused_routing), known)
        assert 2 * found + CAPTURED_ROUTING == pytest.approx(launches)


@pytest.mark.parametrize(
    ("architecture", "tuned", "times"),
    [("ampere", 0.0, 1.0), ("hopper", 1.0, 1.0), ("hopper", 0.0, 0.8), ("blackwell-ultra", 0.0, 1.2)],
)
def test_products_by_architecture_and_by_who_chooses_their_kernels(
    architecture: str, tuned: float, times: float
) -> None:
    device = Cluster.preset("h100").device
    assert device is not None
    table = _row(architecture=float(ARCHITECTURES.index(architecture)), tuned=tuned)
    (found,) = products(table, Constants(first=0.8, ultra=1.2), device)
    assert found.best == pytest.approx(times * device.efficiency.matmul[0].best)
