"""What a run says of its memory budget, on each line and at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from hyper_parallel.train.summary import BudgetMeter, line

MIB = 2**20


@dataclass
class _Budget:
    """As `step.memory_budget.Budget` shows itself."""

    bytes: int = 100 * MIB
    peak: int = 96 * MIB
    copied: Counter[tuple[str, bool]] = field(default_factory=Counter)
    waited: float = 0.0

    def stalled(self) -> float:
        return 0.25

    def copy(self, out: int, back: int, waited: float) -> None:
        self.copied = self.copied + Counter({("flash", True): out, ("flash", False): back})
        self.waited += waited


@pytest.fixture
def meter() -> BudgetMeter:
    budget = _Budget()
    meter = BudgetMeter(budget)  # type: ignore[arg-type]
    budget.copy(7 * MIB, 0, 5.0)  # what comes to rest before the first step is no part of it
    for _ in range(2):
        meter.begin()
        budget.copy(20 * MIB, 10 * MIB, 0.5)
        meter.end(2.0)
        budget.copy(0, 3 * MIB, 1.0)  # an evaluation between two steps
    return meter


def test_a_step_copies_and_waits(meter: BudgetMeter) -> None:
    meter.record(425.8 * MIB, on_cpu=True)
    use = meter.use()
    assert use is not None
    assert (use.out, use.back) == ({"flash": 20 * MIB}, {"flash": 10 * MIB})
    assert (use.waited, use.share) == (0.5, 0.25)
    assert use.rows() == [
        ("device memory", "96.0 MiB at most, by the plan, of a budget of 100.0 MiB: met"),
        ("copies, flash", "20.0 MiB to it and 10.0 MiB back a step"),
        ("copies waited for", "500 ms a step, 25% of its time"),
        ("process memory", "425.8 MiB resident; not governed: it includes Python and the tiers"),
    ]


def test_a_line_shows_the_peak_against_the_budget(meter: BudgetMeter) -> None:
    record = {"loss": 5.0, "grad_norm": 1.0, "lr": 1e-3, "memory": 425.8 * MIB}
    shown = line(3, 30, {**record, **meter.record(425.8 * MIB, on_cpu=True)}, 10.0)
    assert "device 96.0 of 100.0 MiB  " in shown and "process 425.8 MiB" in shown
    narrow = line(3, 30, {**record, **meter.record(425.8 * MIB, on_cpu=True)}, 10.0, 70)
    assert "device 96.0 of 100.0 MiB" in narrow and len(narrow) <= 70
    without = line(3, 30, record, 10.0)
    assert "  425.8 MiB  " in without and "device" not in without


def test_an_accelerator_has_no_process_memory(meter: BudgetMeter) -> None:
    assert "memory_process" not in meter.record(50 * MIB, on_cpu=False)
    use = meter.use()
    assert use is not None and use.process == 0


def test_before_the_first_step_there_is_nothing() -> None:
    assert BudgetMeter(_Budget()).use() is None  # type: ignore[arg-type]
