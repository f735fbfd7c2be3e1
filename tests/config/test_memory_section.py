"""Budgets in bytes: how they are written, read back, and refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hyper_parallel.config.load import from_dict
from hyper_parallel.errors import ConfigError, StrategyError
from hyper_parallel.strategy import Strategy, recomputed_layers
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.units import exact_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("10GiB", 10 * 2**30), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), ("1GB", 10**9), ("7", 7), ("0", 0)],
)
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert parse_bytes(str(exact_bytes(count))) == count


@pytest.mark.parametrize("text", ["ten", "", "GiB", "-1GiB", "1e9", "3 g", "1GiBs"])
def test_what_is_no_number_of_bytes_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="write 10GiB, 512MiB, or the number itself"):
        parse_bytes(text)


def test_a_budget_is_written_as_it_was_given() -> None:
    strategy = Strategy(memory=Memory(device="1.5GiB", host=2**36, flash="./spill"))
    assert strategy.memory.device == 3 * 2**29
    written = strategy.model_dump(mode="json")
    assert written["memory"]["device"] == "1536MiB"
    assert written["memory"]["host"] == "64GiB"
    assert Strategy.model_validate(written) == strategy


def test_a_budget_needs_a_place_to_go_and_a_place_a_budget() -> None:
    with pytest.raises(ValidationError, match="set host or pool to a number of bytes, or flash"):
        Memory(device="1GiB")
    with pytest.raises(ValidationError, match="set device to what it may hold"):
        Memory(flash="./spill")
    with pytest.raises(ValidationError, match="greater than 0"):
        Memory(device=0, host="1GiB")


def test_layers_that_are_recomputed() -> None:
    chosen = Memory(recompute="layer", recompute_layers=2)
    assert recomputed_layers(chosen, [8]) == [0, 1]
    assert recomputed_layers(chosen, [3, 1, 4]) == [0, 1, 3, 4, 5]
    assert recomputed_layers(Memory(recompute="selective"), [2, 1]) == [0, 1, 2]
    assert recomputed_layers(Memory(recompute="layer", recompute_layers=[2, 0, 1]), [2, 2, 2]) == [0, 1, 4]
    assert recomputed_layers(Memory(recompute="none"), [2]) == recomputed_layers(Memory(), [2]) == []


def test_layers_that_cannot_be_recomputed_are_told_in_a_line() -> None:
    with pytest.raises(
        ValidationError, match="set recompute to layer or selective, or leave recompute_layers out"
    ):
        Memory(recompute_layers=2)
    with pytest.raises(ValidationError, match="'recompute: none' recomputes none by number"):
        Memory(recompute="none", recompute_layers=[1, 1])
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Memory(recompute="layer", recompute_layers=0)
    chosen = Memory(recompute="layer", recompute_layers=5)
    with pytest.raises(
        StrategyError, match="5 is too large: the model has 4 layers; give at most 4, or leave"
    ):
        recomputed_layers(chosen, [4])
    with pytest.raises(StrategyError, match="5 is too large: the largest stage has 3 layers; give at most 3"):
        recomputed_layers(chosen, [3, 1])
    with pytest.raises(StrategyError, match="1 stage \\(no pipeline\\); give one number for each stage"):
        recomputed_layers(Memory(recompute="layer", recompute_layers=[1, 1]), [4])


def _run(train: dict[str, object]) -> dict[str, object]:
    return {
        "version": 1,
        "out": "runs/x",
        "model": {"config": {"model_type": "llama"}},
        "data": {"train": "python-stdlib", "sequence": 32},
        "train": {"steps": 1, "batch": 2, **train},
        "strategy": {"memory": {"device": "1GiB", "host": "1GiB"}},
    }


REFUSED = [
    ({"engine": "eager"}, "set train.engine to graph"),
    ({"compile": True}, "set train.compile to false"),
]


@pytest.mark.parametrize(("train", "said"), REFUSED)
def test_a_budget_needs_the_graph_as_it_is(train: dict[str, object], said: str) -> None:
    from_dict(_run({}))
    with pytest.raises(ConfigError, match=said):
        from_dict(_run(train))
