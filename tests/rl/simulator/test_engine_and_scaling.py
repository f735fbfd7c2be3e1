"""Engines keep time by closed forms, lengths have the moments they say, and role times are fitted as measured."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.config.rl_simulation import GenerationTime, Lengths, RlSimulation, RoleTime
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.simulator import scaling, simulate_colocated
from hyper_parallel.rl.simulator.loop import Engine


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 40)), min_size=1, max_size=12))
def test_an_engine_takes_as_long_as_its_passes_one_by_one(arrivals: list[tuple[float, int]]) -> None:
    """Against a simulation that makes each pass in small steps of time."""
    engine = Engine(99, 0.5, 0.25)
    ends: dict[int, float] = {}

    def until(now: float) -> None:
        while engine.next_end() <= now:
            when, ticket, _ = engine.end()
            ends[ticket] = when

    for ticket, (when, tokens) in enumerate(sorted(arrivals)):
        until(when)
        engine.join(when, ticket, tokens)
    until(math.inf if not engine.running else 1e9)
    waiting = [(when, ticket, float(tokens)) for ticket, (when, tokens) in enumerate(sorted(arrivals))]
    running: dict[int, float] = {}
    now, slow = 0.0, {}
    while waiting or running:
        rate = 1 / (0.5 + 0.25 * len(running))
        arrives = waiting[0][0] if waiting else math.inf
        first = min(running, key=running.__getitem__, default=None)
        leaves = now + running[first] / rate if first is not None else math.inf
        step = min(arrives, leaves) - now
        running = {ticket: left - step * rate for ticket, left in running.items()}
        now += step
        if leaves <= arrives and first is not None:
            del running[first]
            slow[first] = now
        else:
            _, ticket, left = waiting.pop(0)
            running[ticket] = left
    assert ends.keys() == slow.keys()
    assert all(ends[ticket] == pytest.approx(slow[ticket], rel=1e-9, abs=1e-9) for ticket in ends)


def test_a_pause_delays_and_a_stop_counts_tokens() -> None:
    engine = Engine(4, 1.0, 0.0)
    engine.join(0.0, 7, 10)
    engine.join(2.0, 8, 10)
    engine.pause(4.0, 9.0)
    assert engine.held_tokens == 4 + 2
    assert engine.next_end() == 15.0
    assert engine.stop(10.0, {8}) == {8: 3.0}
    assert engine.end() == (15.0, 7, 10)
    assert engine.busy == 4.0 + 6.0
    assert engine.tokens == 10 + 3


@pytest.mark.parametrize("longest", [500, 2**20])
def test_lengths_have_their_mean_and_limit(longest: int) -> None:
    given_lengths = Lengths(mean=400, sigma=1.0, longest=longest)
    source = random.Random(0)
    drawn = [scaling.draw_length(given_lengths, source) for _ in range(40_000)]
    assert statistics.fmean(drawn) == pytest.approx(scaling.mean_length(given_lengths), rel=0.02)
    assert max(drawn) <= longest
    constant = Lengths(distribution="constant", mean=30, longest=20)
    assert scaling.draw_length(constant, source) == scaling.mean_length(constant) == 20


@given(st.floats(0.1, 100), st.floats(0.1, 1000))
def test_a_law_is_found_again(fixed: float, work: float) -> None:
    found = scaling.fit({n: fixed + work / n for n in (2, 8, 32)})
    assert found == (pytest.approx(fixed, rel=1e-6), pytest.approx(work, rel=1e-6))


def test_role_times() -> None:
    assert scaling.seconds_on(RoleTime(fixed=2, work=12), 4, "train") == 5
    measured = RoleTime(measured={4: 10.0, 8: 7.0})
    assert scaling.seconds_on(measured, 4, "train") == 10
    assert scaling.seconds_on(measured, 2, "train") == pytest.approx(16)
    assert scaling.fit({2: 1.0, 4: 2.0}) == (1.5, 0.0), "more devices are no slower"
    with pytest.raises(ConfigError, match=r"train\.measured: has 4 devices only, and 8 are simulated"):
        scaling.seconds_on(RoleTime(measured={4: 10.0}), 8, "train")


def test_fitted_generation_takes_what_was_measured() -> None:
    """The colocated loop on both numbers of devices gives the measured times back."""
    measured = {4: 20.0, 16: 11.0}
    for devices, seconds in measured.items():
        setup = RlSimulation(
            devices=devices,
            batch=64,
            group=4,
            lengths=Lengths(mean=300, sigma=0.8, longest=1000),
            generation=GenerationTime(measured=measured),
            train=RoleTime(fixed=1.0),
            steps=20,
        )
        assert simulate_colocated(setup).seconds == pytest.approx(seconds + 1, rel=0.04)
