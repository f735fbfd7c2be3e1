"""Plans that are made quickly, as exact and slower to run, but in the whole matrix."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(autouse=True)
def _quick_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("matrix") is None:
        monkeypatch.setattr(importlib.import_module("hyper_parallel.offloading.schedule.solve"), "WORK", 0)
        monkeypatch.setattr(
            importlib.import_module("hyper_parallel.offloading.schedule.graph_search"), "PLANS", 1
        )
