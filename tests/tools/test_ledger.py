"""The ledger of test costs and its tiers; processor time of processes that are ended and alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.ledger import CASE_S, DEVICE, DEVICE_S, FAST_S, FUNCTION_S, Cost, Ledger
from harness.processor_time import tree_seconds

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def ledger() -> Ledger:
    return Ledger(
        {
            "tests/a.py::test_cheap": Cost(FAST_S / 2, False),
            "tests/a.py::test_worker": Cost(FAST_S / 2, True),
            "tests/a.py::test_long": Cost(CASE_S + 1, False),
            **{f"tests/b.py::test_many[{i}]": Cost(FUNCTION_S / 4, True) for i in range(6)},
        }
    )


def test_tiers() -> None:
    cases = [*ledger().costs, "tests/c.py::test_new"]
    assert ledger().chosen("fast", cases) == {"tests/a.py::test_cheap", "tests/c.py::test_new"}
    many = {f"tests/b.py::test_many[{i}]" for i in range(6)}
    first = {f"tests/b.py::test_many[{i}]" for i in range(4)}
    kept = first | {"tests/a.py::test_cheap", "tests/a.py::test_worker", "tests/c.py::test_new"}
    assert ledger().chosen("test", cases) == kept
    assert ledger().chosen("rest", cases) == (many - first) | {"tests/a.py::test_long"}
    assert ledger().chosen("all", cases) == set(cases)


def test_the_rehearsal_device_has_its_own_seconds() -> None:
    cases = [f"{DEVICE}test_x.py::test_{i}" for i in range(4)]
    known = Ledger({case: Cost(DEVICE_S / 3, True) for case in cases})
    assert known.chosen("test", cases) == set(cases[:3])
    assert not known.chosen("fast", cases)


def test_every_case_is_in_one_part() -> None:
    cases = [*ledger().costs, *(f"tests/d.py::test_{i}" for i in range(100))]
    for count in (1, 3, 8):
        parts = [ledger().part(cases, number, count) for number in range(1, count + 1)]
        assert [case for part in parts for case in part] == cases


def test_a_ledger_is_written_and_read(tmp_path: Path) -> None:
    ledger().write(tmp_path / "ledger.json")
    again = Ledger.read(tmp_path / "ledger.json")
    assert again.costs == ledger().costs
    assert Ledger.read(tmp_path / "missing.json").cost("tests/a.py::test_cheap") == Cost(0.0, False)


def test_a_case_that_costs_more_without_those_of_other_tiers_leaves_its_tier() -> None:
    cases = [*ledger().costs]
    raised = ledger().raised({cases[0]: Cost(CASE_S + 1, False), cases[1]: Cost(0.0, False)})
    assert ledger().chosen("test", cases) - raised.chosen("test", cases) == {cases[0]}


def test_seconds_of_children_count_while_they_live_and_after() -> None:
    before = tree_seconds()
    child = subprocess.Popen(
        [sys.executable, "-c", BURN + "print(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    alive = tree_seconds() - before
    child.communicate(b"\n")
    assert 0.25 < alive <= tree_seconds() - before + 0.02
