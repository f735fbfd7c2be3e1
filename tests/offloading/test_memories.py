"""What is measured of the memories beside a device as a run starts: no more than its plans go by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_parallel.offloading import open_tiers
from hyper_parallel.offloading.autograd.capture_passes import PassSettings
from hyper_parallel.offloading.autograd.plan_cache import Plans
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.strategy import Strategy

MiB = 2**20


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tiers whose updates are measured."""
    names: list[str] = []

    def measure(tier: Any, *_: object) -> float:
        names.append(tier.name)
        return 1e9

    monkeypatch.setattr(open_tiers, "measure_work", measure)
    return names


@pytest.mark.parametrize(
    ("update", "expected"), [("device", []), ("auto", ["host", "pool"]), ("host", ["host", "pool"])]
)
def test_updates_on_the_host_are_measured_where_a_run_may_have_some(
    update: str, expected: list[str], looked_at: list[str]
) -> None:
    memory = {"device": MiB, "host": MiB, "pool": MiB, "update": update}
    Budget(Strategy.model_validate({"memory": memory}), "cpu", run=f"updates {update}").close()
    assert looked_at == expected


def test_a_loop_of_ones_own_updates_what_it_updates_itself(looked_at: list[str]) -> None:
    Plans(torch.device("cpu"), MiB, MiB, None, None, PassSettings()).close()
    assert looked_at == []
