"""The checkpoint section: how often one is written, as steps or as time."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hyper_parallel.config import CheckpointConfig
from hyper_parallel.units import parse_seconds


@pytest.mark.parametrize(
    ("given", "steps", "seconds"),
    [("15min", None, 900), ("90s", None, 90), ("1.5 h", None, 5400), (50, 50, None), (0, None, None)],
)
def test_an_interval_is_of_steps_or_of_time(
    given: int | str, steps: int | None, seconds: float | None
) -> None:
    config = CheckpointConfig.model_validate({"every": given})
    assert (config.every_steps, config.every_seconds) == (steps, seconds)
    assert CheckpointConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_run_that_says_nothing_is_saved_every_quarter_of_an_hour() -> None:
    assert CheckpointConfig().every_seconds == 900


@pytest.mark.parametrize("given", ["50", "15 parsecs", "", "-5min", "0s", -1, 2.5, True, None, ["15min"]])
def test_what_is_no_interval_is_refused(given: object) -> None:
    with pytest.raises(ValidationError, match="a number of steps"):
        CheckpointConfig.model_validate({"every": given})


def test_lengths_of_time() -> None:
    assert [parse_seconds(text) for text in ("2d", "3sec", " 1H ")] == [172800, 3, 3600]
    with pytest.raises(ValueError, match="no length of time"):
        parse_seconds("1min30s")
