"""CPU workers that cannot fit into the machine's memory are refused before they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel import config
from hyper_parallel.cli.preflight import _available, check_memory
from hyper_parallel.errors import ConfigError
from hyper_parallel.proc import MEMORY, bytes_in

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
LARGE = (
    "model.config.hidden_size=4096", "model.config.intermediate_size=14336", "model.config.num_hidden_layers=32",
    "launch.device=cpu", "strategy.axes={shard: 64}", "train.batch=64", "strategy.sequence=false",
)  # fmt: skip
GIB = 2**30


def test_a_model_that_cannot_fit_is_refused_with_both_numbers() -> None:
    run = config.load(QUICKSTART, LARGE)
    with pytest.raises(
        ConfigError, match=r"64 CPU workers on this machine need at least .* 24.0 GiB are avail"
    ):
        check_memory(run, 24 * GIB)


def test_what_is_available_is_what_the_system_says() -> None:
    found, free = _available(), bytes_in(MEMORY, "MemAvailable")
    assert found is not None and free is not None
    assert 0.5 * free < found < bytes_in(MEMORY, "MemTotal") + bytes_in(MEMORY, "SwapTotal")  # type: ignore[operator]


def test_what_fits_is_not_refused() -> None:
    check_memory(config.load(QUICKSTART, LARGE), 400 * GIB)
    check_memory(config.load(QUICKSTART), GIB)
    check_memory(config.load(QUICKSTART, ["strategy.axes={shard: 64}", "train.batch=64"]), 2 * GIB)


def test_a_budget_offloads_what_does_not_fit(tmp_path: Path) -> None:
    budget = f"strategy.memory={{device: 1GiB, host: 1GiB, flash: {tmp_path}}}"
    check_memory(config.load(QUICKSTART, [*LARGE, budget]), 24 * GIB)
