"""A pytest plugin that measures the processor seconds of each test and selects a tier (`harness.ledger`).

`--tier TIER` runs the tests of a tier; `--ledger FILE` writes what each took, of a tier what it took more than in
FILE: there a case may pay alone for a fixture that it shares with cases of other tiers. A run ends with the cases that
took more than twice what their tier allows: they are of another one, once the ledger is written anew (`make ledger`).
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.ledger import Cost, Ledger, limit
from harness.processor_time import descendants, tree_seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=("fast", "test", "rest", "all"), default="all", help="which tests to run"
    )
    parser.addoption(
        "--slice", metavar="i/n", default="1/1", help="of these, the i-th of n parts of about equal length"
    )
    parser.addoption("--ledger", metavar="FILE", help="write the processor seconds of each test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter(config.getoption("--ledger") is not None), "meter")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Accounts(config), "accounts")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: the garbage collector need not look at it now nor in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ledger = Ledger.read()
    chosen = ledger.chosen(config.getoption("--tier"), [item.nodeid for item in items])
    number, count = map(int, config.getoption("--slice").split("/"))
    chosen = set(ledger.part([item.nodeid for item in items if item.nodeid in chosen], number, count))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


class Meter:
    """In each process that runs tests: adds to a test's last report what it took."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        """Whether the fork server has to be there before the first test, so that its imports are no test's."""
        self.shared: dict[str, float] = {}
        self.nested: list[float] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.exact:
            from harness.fork_server import warm_up

            warm_up()
        self.began, self.began_here = tree_seconds(), time.process_time()
        self.processes = set(descendants(os.getpid()))
        self.shared = {}
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        began = tree_seconds()
        self.nested.append(0.0)
        try:
            return (yield)
        finally:
            seconds = tree_seconds() - began
            self.shared[_name(fixturedef)] = seconds - self.nested.pop()
            if self.nested:
                self.nested[-1] += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            seconds, here = tree_seconds() - self.began, time.process_time() - self.began_here
            started = set(descendants(os.getpid())) - self.processes
            used = [_name(known[-1]) for known in item._fixtureinfo.name2fixturedefs.values()]
            measured = {
                "seconds": seconds - sum(self.shared.values()),
                "starts_processes": bool(started) or seconds - here > 0.005,
                "shared": self.shared,
                "uses": used,
            }
            report.user_properties.append(("cost", measured))
        return report


def _name(definition: Any) -> str:
    return f"{definition.baseid}::{definition.argname}"


class Accounts:
    """In the process that pytest was started as: collects the costs, and writes or judges them at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.tier = config.getoption("--tier")
        self.file = config.getoption("--ledger")
        self.measured: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cost":
                self.measured[report.nodeid] = value

    def costs(self) -> dict[str, Cost]:
        """What each case took, with its part of the fixtures that it shares."""
        fixtures: dict[str, float] = defaultdict(float)
        users: dict[str, int] = defaultdict(int)
        for entry in self.measured.values():
            for name, seconds in entry["shared"].items():
                fixtures[name] += seconds
            for name in entry["uses"]:
                users[name] += 1
        return {
            case: Cost(
                entry["seconds"]
                + sum(fixtures[name] / users[name] for name in entry["uses"] if name in fixtures),
                entry["starts_processes"],
            )
            for case, entry in self.measured.items()
        }

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        costs = self.costs()
        if self.file:
            before = Ledger({}) if self.tier == "all" else Ledger.read(Path(self.file))
            before.raised(costs).write(Path(self.file))
        total = sum(cost.seconds for cost in costs.values())
        terminalreporter.write_line(f"{total:.0f} processor seconds in {len(costs)} tests")
        for case, cost in sorted(costs.items(), key=lambda entry: -entry[1].seconds):
            if cost.seconds > 2 * limit(self.tier, cost, case) and cost.seconds > 0.1:
                terminalreporter.write_line(
                    f"outgrown: {case} took {cost.seconds:.1f} s; "
                    f"the tier {self.tier} allows {limit(self.tier, cost, case):g} s"
                )
