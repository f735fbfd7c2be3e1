"""The simulated loop obeys closed forms where there are any, holds the bound, and gives the same for a seed."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.config.rl_simulation import RlSimulation
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.simulator import best_split, simulate_colocated, simulate_loop
from hyper_parallel.rl.simulator.run import compare, lower_bound, ranked_splits

CONSTANT: dict[str, Any] = {
    "devices": 8,
    "rollout": 4,
    "batch": 16,
    "lengths": {"distribution": "constant", "mean": 100},
    "generation": {"pass_seconds": 0.1, "slots": 4},
    "train": {"work": 24.0},
    "steps": 6,
}
TAIL: dict[str, Any] = {
    "devices": 8,
    "rollout": 4,
    "batch": 64,
    "lengths": {"mean": 100, "sigma": 1.0},
    "generation": {"pass_seconds": 0.1, "slots": 8},
    "train": {"work": 120.0},
    "steps": 20,
}


def test_the_colocated_loop_adds_its_parts() -> None:
    setup = RlSimulation(
        **CONSTANT,
        score={"fixed": 1.0},
        switch_seconds=2.0,
        reward_seconds=0.5,
        updates=3,
        batches_per_step=1,
    )
    found = simulate_colocated(setup)
    # 16 answers on 8 engines of 4 slots: 100 passes; then the reward, the scores, the updates and the switch.
    assert found.seconds == pytest.approx(10 + 0.5 + 1.0 + 24 / 8 + 2.0)
    assert found.bubble == pytest.approx(1 - (10 + 1.0 + 3.0) / found.seconds)
    assert found.histogram == {2: 16 * (setup.warmup + setup.steps)}
    assert found.running == pytest.approx(2.0)


@pytest.mark.parametrize("order", ["fifo", "window", "discard", "capacity"])
def test_equal_answers_overlap_as_in_closed_form(order: str) -> None:
    def seconds(staleness: int, train: float) -> float:
        setup = RlSimulation(**{**CONSTANT, "train": {"work": train}}, order=order, staleness=staleness)
        return simulate_loop(setup).seconds

    # Four engines of four slots: a batch takes 10 s, its updates on four devices train / 4.
    assert seconds(0, 24.0) == pytest.approx(10 + 6)
    assert seconds(1, 24.0) == pytest.approx(10)
    assert seconds(1, 60.0) == pytest.approx(15)
    assert seconds(4, 60.0) == pytest.approx(15)


def test_the_transfer_stops_both_sides() -> None:
    setup = RlSimulation(**CONSTANT, staleness=1, transfer_seconds=3.0)
    assert simulate_loop(setup).seconds == pytest.approx(10 + 3)
    drained = RlSimulation(
        **{**CONSTANT, "generation": {**CONSTANT["generation"], "interrupt": False}}, staleness=1
    )
    assert simulate_loop(drained).seconds == pytest.approx(10)


@pytest.mark.parametrize("interrupt", [True, False])
@pytest.mark.parametrize("order", ["fifo", "window", "discard"])
def test_the_bound_holds_in_every_order(order: str, interrupt: bool) -> None:
    generation = {**TAIL["generation"], "interrupt": interrupt, "recompute_seconds": 1e-3}
    for staleness in (1, 3):
        setup = RlSimulation(
            **{**TAIL, "generation": generation, "updates": 2}, order=order, staleness=staleness, refused=0.1
        )
        found = simulate_loop(setup)
        assert found.largest_staleness <= staleness
        assert found.wasted > 0.05
        assert (found.stale_groups > 0) <= (order == "discard")


def test_capacity_alone_exceeds_the_bound_where_window_waits() -> None:
    capacity, window, fifo, discard = (
        simulate_loop(RlSimulation(**TAIL, order=order, staleness=1))
        for order in ("capacity", "window", "fifo", "discard")
    )
    assert capacity.largest_staleness > 1 == window.largest_staleness
    assert capacity.seconds < window.seconds < fifo.seconds
    assert discard.wasted > 0 == window.wasted


def test_a_seed_gives_the_same_and_another_one_does_not() -> None:
    one, again, other = (
        simulate_loop(RlSimulation(**TAIL, staleness=2, order="discard", refused=0.2, seed=seed))
        for seed in (3, 3, 4)
    )
    assert one == again
    assert one.tokens != other.tokens


@pytest.mark.parametrize("first", [1, 2, 3])
def test_the_first_of_ranked_splits_are_the_best_of_all(first: int) -> None:
    """Here the order of the bounds is not that of the times."""
    setup = RlSimulation(
        devices=8,
        batch=8,
        lengths={"mean": 20, "sigma": 1.0},
        generation={"pass_seconds": 0.1, "slots": 1},
        train={"work": 10.0},
        steps=6,
        staleness=2,
    )
    splits = [(rollout, 8 - rollout) for rollout in range(1, 8)]
    found = ranked_splits(setup, splits, first)
    every = sorted((simulate_loop(setup, rollout).seconds, rollout) for rollout, _ in splits)
    assert [(one.seconds, one.rollout_devices) for one in found[:first]] == every[:first]
    assert len(found) < len(splits)


@pytest.mark.parametrize("order", ["fifo", "window"])
def test_the_chosen_split_is_the_best_of_all(order: str) -> None:
    setup = RlSimulation(**{**TAIL, "rollout": "auto", "steps": 8}, order=order, staleness=2)
    found = best_split(setup)
    every = {rollout: simulate_loop(setup, rollout).seconds for rollout in range(1, 8)}
    assert every[found.rollout_devices] == min(every.values()) == found.seconds
    assert found.rollout_devices + found.train_devices == 8
    assert all(lower_bound(setup, rollout) <= seconds * 1.05 for rollout, seconds in every.items())


def test_a_split_of_engines_with_several_devices() -> None:
    generation = {"pass_seconds": 0.1, "slots": 8, "engine": 2}
    setup = RlSimulation(**{**TAIL, "generation": generation, "rollout": "auto", "steps": 4}, staleness=1)
    assert best_split(setup).rollout_devices % 2 == 0
    with pytest.raises(ConfigError, match="multiple of generation"):
        simulate_loop(setup, 3)
    with pytest.raises(ConfigError, match="leaves devices to train"):
        simulate_loop(setup, 8)


def test_the_comparison_in_text_and_json() -> None:
    found = compare(RlSimulation(**{**TAIL, "steps": 4}, staleness=1, order="capacity"))
    text = found.text()
    assert text.startswith("simulated: ")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "'capacity' exceeds it" in text
    data = found.to_json()
    assert data["source"] == "simulated"
    assert [loop["kind"] for loop in data["loops"]] == ["capacity", "fifo", "window", "discard"]
    for loop in data["loops"]:
        assert loop["speed"] == pytest.approx(
            data["colocated"]["seconds_per_step"] / loop["seconds_per_step"], rel=1e-3
        )
