"""Schedules: bounds, continuity, warm-up and floor, for any configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.config.train import ScheduleConfig
from hyper_parallel.train import schedule

NAMES = ["cosine", "linear", "constant", "wsd"]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[ScheduleConfig, int]:
    steps = draw(st.integers(1, 400))
    config = ScheduleConfig(
        name=draw(st.sampled_from(NAMES)),
        warmup=draw(st.integers(0, steps)),
        floor=draw(st.floats(0, 1)),
        decay=draw(st.floats(0.01, 1)),
    )
    return config, steps


@given(schedules())
def test_bounds_peak_and_floor(case: tuple[ScheduleConfig, int]) -> None:
    config, steps = case
    scale = schedule(config, steps)
    values = [scale(step) for step in range(steps)]
    assert all(0 <= value <= 1 for value in values)
    assert all(value > 0 for value in values[: config.warmup])
    if config.warmup:
        assert values[config.warmup - 1] == 1
        assert values[0] == pytest.approx(1 / config.warmup)
    after = values[config.warmup :]
    assert all(value >= config.floor for value in after)
    if after and config.name != "constant":
        assert after[-1] == pytest.approx(config.floor)
        assert scale(steps + 7) == pytest.approx(config.floor)


@given(schedules())
def test_warm_up_rises_and_the_rest_falls_without_jumps(case: tuple[ScheduleConfig, int]) -> None:
    config, steps = case
    scale = schedule(config, steps)
    values = [scale(step) for step in range(steps)]
    left = steps - config.warmup
    # The steepest shape after the warm-up: WSD's decay, over at least one step.
    steepest = {"constant": 0.0, "linear": 1 / max(left, 1), "cosine": 1.6 / max(left, 1)}.get(
        config.name, 1 / max(1, min(round(config.decay * steps), left))
    )
    for step in range(1, steps):
        change = values[step] - values[step - 1]
        if step < config.warmup:
            assert change == pytest.approx(1 / config.warmup)
        else:
            assert change <= 1e-12
            assert -change <= steepest * (1 - config.floor) + 1e-9


def test_shapes_at_known_points() -> None:
    assert [round(schedule(ScheduleConfig(name="cosine", floor=0.0), 4)(s), 4) for s in range(4)] == [
        0.8536, 0.5, 0.1464, 0.0
    ]  # fmt: skip
    assert schedule(ScheduleConfig(name="linear", floor=0.5, warmup=2), 6)(3) == pytest.approx(0.75)
    wsd = schedule(ScheduleConfig(name="wsd", floor=0.0, decay=0.4), 10)
    assert [wsd(s) for s in range(10)] == pytest.approx([1] * 6 + [0.75, 0.5, 0.25, 0.0])
    assert {schedule(ScheduleConfig(name="constant"), 5)(s) for s in range(9)} == {1.0}


def test_a_warm_up_below_one_is_a_share_of_the_steps() -> None:
    for steps, share, expected in ((100, 0.2, 20), (155, 0.03, 5), (3, 0.2, 1), (1000, 0.07, 70)):
        found, whole = (schedule(ScheduleConfig(warmup=warmup), steps) for warmup in (share, expected))
        assert [found(step) for step in range(steps)] == [whole(step) for step in range(steps)]
