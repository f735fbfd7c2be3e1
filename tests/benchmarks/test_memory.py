"""What a graph says of its peak is what an observer sees that knows nothing of the graph."""

from __future__ import annotations

from typing import Any

import budget
import memory
import pytest
import torch

from harness.observer import Observer, UnseenHost
from hyper_parallel.compat import registry
from hyper_parallel.strategy import Strategy


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("llama", {}),
        ("llama", {"memory": {"recompute": "layer"}}),
        ("llama", {"memory": {"recompute": "selective"}}),
        ("qwen3-moe", {}),
    ],
)
def test_the_predicted_peak_is_exact(model: str, strategy: dict[str, Any]) -> None:
    fields = {**memory.MODELS[model], "num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 128}
    found = memory.observed(fields, Strategy(**strategy), rows=2, positions=32)
    assert found["predicted"] == found["live"]


def test_live_bytes_fall_with_each_layer_that_is_recomputed() -> None:
    fields = {**memory.MODELS["llama"], "num_hidden_layers": 3, "vocab_size": 512, "hidden_size": 128}
    live = []
    for count in (0, 1, 2, 3):
        chosen = {"recompute": "layer", "recompute_layers": count} if count else {"recompute": "none"}
        found = memory.observed(fields, Strategy(memory=chosen), rows=8, positions=128)
        assert found["predicted"] == found["live"]
        live.append(found["live"])
    # The last layer comes back right after its forward pass: to recompute it too takes as much as to keep it.
    assert live[0] > live[1] > live[2] >= live[3]


def test_the_observer_counts_a_storage_once_and_until_it_is_gone() -> None:
    x = torch.zeros(100)
    with Observer([x]) as live:
        y = x + 1
        view = y[50:]
        del y
        assert live.alive == 800
        del view
        assert live.alive == 400
        _ = x * 2
        x.untyped_storage().resize_(0)
        assert live.alive == 400  # the product
    assert live.peak == 800


def test_the_host_s_memory_is_not_counted_where_an_update_runs_on_it() -> None:
    x = torch.ones(100, dtype=torch.uint8)
    with UnseenHost(registry.backend("cpu"), 10_000) as tier:
        tier.reserve({0: 100, 1: 9_000})
        tier.begin_write(0, x).wait()
        with Observer([x]) as live:
            tier.begin_work("double", [0], lambda slots: slots[0].mul_(2)).wait()
            y = x + 1
        tier.begin_read(0, x).wait()
    assert live.peak == 200 and y.sum() == x.sum() == 200


def _row(seed: int, live: int = 99) -> dict[str, Any]:
    sizes = {"budget": 100, "predicted": 99, "live": live, "resident": 110, "floor": 50, "working_set": 50}
    return {"seed": seed, "share": 0.5, "same": True, **sizes}


def test_cases_come_from_all_processes_and_one_that_fails_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fresh(group: Any, seeds: range, **environment: str) -> list[dict[str, Any]]:
        if 25 in seeds:
            raise OSError("gone")
        return [_row(seed) for seed in seeds]

    monkeypatch.setattr(budget, "fresh", fresh)
    assert sorted(row["seed"] for row in budget.rows_of(range(3, 24), 2)) == list(range(3, 24))
    with pytest.raises(OSError, match="gone"):
        list(budget.rows_of(range(30), 2))


def test_the_page_of_budgets_says_what_was_run_and_what_was_wrong() -> None:
    text = " ".join(budget.page({"summary": budget.summarized([_row(0), _row(1)], of=2)}))
    assert "In all of 2 cases" in text and "So far" not in text and "Failed" not in text
    assert "It saw at most 99.0000% of a budget" in text and "to 110.0% of the budget in the median" in text
    stopped = budget.summarized([_row(0), _row(7, live=101)], of=3)
    text = " ".join(budget.page({"summary": stopped}))
    assert "So far 2 of 3 cases" in text and "In 1 of 2 cases" in text and "**Failed** seeds: 7." in text


def test_a_case_of_the_budget_benchmark_holds() -> None:
    case = {**budget.draw(3), "layers": 1, "positions": 32, "share": 0.2, "tiers": ("host", "flash")}
    row = budget.run_case(case)
    assert budget.check(row) == []
    assert row["moved"] > 0
