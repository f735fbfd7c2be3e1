"""A pytest plugin that records the processor seconds of each test, with those of all processes that it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.processor_time import descendants, tree_seconds

_costs: dict[str, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ledger", metavar="FILE", help="write what each test cost to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--ledger"):
        config.pluginmanager.register(Ledger(), "cost-ledger")


class Ledger:
    """Measures in each worker; the controller collects."""

    def __init__(self) -> None:
        self.costs: dict[str, dict[str, Any]] = {}
        self.began = 0.0
        self.collection: list[float] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.began = tree_seconds()
        self.before = set(descendants(os.getpid()))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("processor_seconds", tree_seconds() - self.began))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.costs.setdefault(report.nodeid, {"outcome": "passed", "wall": 0.0})
        entry["wall"] += report.duration
        if report.outcome != "passed":
            entry["outcome"] = report.outcome
        if report.when == "teardown":
            entry["cpu"] = dict(report.user_properties).get("processor_seconds", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            Path(session.config.getoption("--ledger")).write_text(json.dumps(self.costs, indent=0))
