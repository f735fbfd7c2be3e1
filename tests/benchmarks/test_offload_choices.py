"""The pages of what each kind of choice gains: the figures that were kept, and what was not run yet."""

from __future__ import annotations

from typing import Any

from offload_choices import AGAIN, ALL, COPIES, UPDATES, again, updates


def _kept(*seconds: dict[str, float]) -> dict[str, Any]:
    """Made up: a budget for each, the seconds of each kind of choice."""
    rows = [
        {
            "link_gib_s": 25,
            "budget_gib": 10.0 * (at + 1),
            "choices": name,
            "step_s": took,
            "updates_on_host": 7 if name in (UPDATES, ALL) else 0,
            "planning_s": 10.0 * took,
        }
        for at, one in enumerate(seconds)
        for name, took in one.items()
    ]
    setting = {"nodes": 1234, "parameters": 9, "without_a_budget_s": 0.5, "peak_gib": 80.0}
    return {"simulated": True, **setting, "of": 4 * len(seconds), "rows": rows}


WHOLE = {COPIES: 4.0, UPDATES: 3.0, AGAIN: 2.0, ALL: 1.0}


def test_a_row_for_each_link_and_budget() -> None:
    kept = _kept(WHOLE, {COPIES: 2.0, UPDATES: 1.5, AGAIN: 1.5, ALL: 1.0})
    shown = list(again(kept))
    assert "| 25 GiB/s | 10.0 GiB | 4.000 s | 2.000 s | 50% |" in shown
    assert "| 25 GiB/s | 20.0 GiB | 2.000 s | 1.500 s | 25% |" in shown
    assert "Planning with these choices took 15.0 to 20.0 s of a processor." in shown
    assert "| 25 GiB/s | 10.0 GiB | 4.000 s | 3.000 s (7) | 2.000 s | 1.000 s (7) |" in list(updates(kept))
    for text in (" ".join(shown), " ".join(updates(kept))):
        assert text.startswith("Simulated: ") and "1,234 nodes, 80.0 GiB at its peak, 0.500 s" in text
        assert "So far" not in text and "not run" not in text and "missed" not in text


def test_a_run_that_was_stopped_says_so() -> None:
    kept = _kept(WHOLE, {COPIES: 2.0, UPDATES: 1.5})
    for text in (list(again(kept)), list(updates(kept))):
        assert "So far 6 of the benchmark's 8 plans were made." in text
        (row,) = [line for line in text if "20.0 GiB" in line]
        assert "2.000 s" in row and "not run yet" in row


def test_where_fewer_choices_were_quicker_the_search_missed_it() -> None:
    text = " ".join(updates(_kept(WHOLE, {**WHOLE, ALL: 2.5}, {**WHOLE, ALL: 2.0001})))
    assert "At 25 GiB/s and 20.0 GiB all choices together come to a slower step" in text
