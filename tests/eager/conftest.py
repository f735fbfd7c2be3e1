"""Plans that are made quickly: as exact, and slower to run."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(autouse=True)
def _quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("hyper_parallel.offload.choose"), "WORK", 0)
