"""What is chosen for a run file with open axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from auto_cases import machine, run_file

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.auto.candidates import ALIKE, CLOSE, Simulated
from hyper_parallel.planner.auto.choose import choose
from hyper_parallel.planner.auto.open_axes import resolved

FOUR = machine(4).for_workers(4)


def test_the_only_strategy_there_is_is_taken(tmp_path: Path) -> None:
    # One head cannot be split, and what is left open besides is the copies.
    open_ = {"axes": {"replicate": "auto", "tensor": "auto"}, "memory": {"recompute": "none"}}
    run = run_file(tmp_path, open_, heads=1, train={"batch": 4})
    choice = choose(run, FOUR, 4, simulate=None)
    assert choice.laid["strategy"]["axes"] == {"replicate": 4} and choice.laid["train"] == {"micro_batch": 1}
    assert "replicate 4" in choice.lines[0] and "estimated" in choice.lines[1]
    then = resolved(run, choice.laid)
    assert not then.open and then.strategy.axes.world == 4 and then.strategy.cluster is None


def test_of_the_simulated_the_quickest_that_fits_is_taken(tmp_path: Path) -> None:
    seen: list[RunConfig] = []

    def simulate(runs: Sequence[RunConfig], cluster: Cluster) -> list[Simulated]:
        seen.extend(runs)
        found = [Simulated(1.0, True)] * len(runs)
        found[1:5] = [
            Simulated(0.2, False),
            Simulated(None, reason="no"),
            Simulated(0.6, True),
            Simulated(0.5, True),
        ]
        return found

    run = run_file(tmp_path)
    choice = choose(run, FOUR, 4, simulate=simulate)
    assert resolved(run, choice.laid) == seen[4]
    assert "500 ms in the simulator's prediction" in choice.lines[1]
    laid = [str(one.strategy.axes) for one in seen]
    assert all(one.strategy.axes.world == 4 for one in seen)
    assert max(map(laid.count, laid)) <= ALIKE and len(set(laid)) > 3
    assert len({one.model_dump_json() for one in seen}) == len(seen)


def test_what_is_predicted_close_is_worth_a_trial_other_degrees_first(tmp_path: Path) -> None:
    seen: list[RunConfig] = []

    def simulate(runs: Sequence[RunConfig], cluster: Cluster) -> list[Simulated]:
        seen.extend(runs)
        return [Simulated(1.0 + 0.04 * place, True) for place in range(len(runs))]

    run = run_file(tmp_path)
    choice = choose(run, FOUR, 4, simulate=simulate)
    order = [seen.index(resolved(run, one.laid)) for one in (choice, *choice.close)]
    near = [place for place in range(len(seen)) if 1.0 + 0.04 * place <= CLOSE]
    assert sorted(order) == near
    degrees = [str(seen[place].strategy.axes) for place in order]
    firsts = len(set(degrees))
    assert len(set(degrees[:firsts])) == firsts < len(order)
    assert order[:firsts] == sorted(order[:firsts]) and order[firsts:] == sorted(order[firsts:])
    assert choice.close[0].name in choice.close[0].lines[0]


def test_what_the_file_writes_stays(tmp_path: Path) -> None:
    strategy = {"axes": {"shard": "auto", "tensor": 2}, "memory": {"shard": "gradients"}, "sequence": True}
    run = run_file(tmp_path, strategy, train={"batch": 8, "micro_batch": 2})
    then = resolved(run, choose(run, FOUR, 4, simulate=None).laid)
    assert (then.strategy.axes.shard, then.strategy.axes.tensor_x) == (2, 2)
    assert (then.strategy.memory.shard, then.strategy.sequence, then.train.micro_batch) == (
        "gradients",
        True,
        2,
    )


def test_one_line_says_that_nothing_fits_and_what_would(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"fits no strategy of 4 workers: the smallest of .* more workers"
    ) as raised:
        choose(run_file(tmp_path), machine(4, gib=0.5).for_workers(4), 4, simulate=None)
    assert "\n" not in str(raised.value)


def test_within_a_budget_that_nothing_fits_the_smallest_is_taken(tmp_path: Path) -> None:
    strategy = {"axes": "auto", "memory": {"device": "64KiB", "host": "1GiB"}}
    run = run_file(tmp_path, strategy)
    then = resolved(run, choose(run, FOUR, 4, simulate=None).laid)
    assert then.strategy.memory.device == 1 << 16
    assert then.strategy.memory.shard == "parameters" and then.strategy.axes.replicate == 1


def test_a_preset_gives_the_interval_of_published_runs(tmp_path: Path) -> None:
    run = run_file(tmp_path)
    choice = choose(run, replace(Cluster.named("h100x8"), node=8), 8, simulate=None)
    assert "90% of published runs" in choice.lines[1] and "for 8 workers on h100x8" in choice.lines[0]


LARGE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
"""A model of 70 billion parameters: with its optimizer's state twice what eight devices of 80 GB have."""


def _large(folder: Path, strategy: object) -> RunConfig:
    sections = {"model": {"config": LARGE}, "data": {"sequence": 4096}, "launch": {"device": "cuda"}}
    # The vocabulary of the run is the model's.
    return run_file(folder, strategy, train={"batch": 64}, **sections)


@pytest.mark.parametrize("strategy", ["auto", {"axes": "auto", "memory": "auto"}])
def test_what_does_not_fit_the_devices_gets_a_budget_in_bytes(tmp_path: Path, strategy: object) -> None:
    h100 = Cluster.named("h100x8")
    run = _large(tmp_path, strategy)
    choice = choose(run, h100, 8, simulate=None)
    memory = resolved(run, choice.laid).strategy.memory
    assert h100.device is not None and h100.host is not None
    assert memory.device is not None and memory.host is not None
    assert 0.8 * h100.device.memory.bytes < memory.device < h100.device.memory.bytes
    assert memory.host * 8 <= 0.8 * h100.host.bytes
    assert any("a memory budget, since without one" in line for line in choice.lines)


def test_memory_alone_may_be_left_to_the_planner(tmp_path: Path) -> None:
    run = _large(tmp_path, {"axes": {"tensor": 2, "shard": 4}, "memory": "auto"})
    assert run.open
    then = resolved(run, choose(run, Cluster.named("h100x8"), 8, simulate=None).laid)
    assert then.strategy.memory.device is not None and not then.open
    assert (then.strategy.axes.shard, then.strategy.axes.tensor_x) == (4, 2)
    assert then.strategy.axes.order == run.strategy.axes.order


def test_what_fits_has_the_same_strategy_with_a_budget_left_open(tmp_path: Path) -> None:
    some = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}
    sections = {"model": {"config": {**LARGE, **some}}, "data": {"sequence": 4096}}
    found = []
    for memory in ("auto", {"device": "76GiB", "host": "100GiB"}):
        run = run_file(tmp_path, {"axes": "auto", "memory": memory}, train={"batch": 64}, **sections)
        found.append(resolved(run, choose(run, Cluster.named("h100x8"), 8, simulate=None).laid).strategy)
    assert found[0].memory.device is None
    assert found[0].axes == found[1].axes


def test_what_fits_nowhere_says_by_how_much_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"of which a worker may use .* of host memory for each worker too"
    ) as raised:
        choose(_large(tmp_path, "auto"), Cluster.named("h100x2"), 2, simulate=None)
    assert "more workers" in str(raised.value) and "\n" not in str(raised.value)
