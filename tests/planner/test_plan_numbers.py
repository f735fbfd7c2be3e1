"""Numbers of questions, as people write them."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner import query


def test_spans_double_and_end_where_they_end() -> None:
    assert query.span("--devices", "64..4096") == (64, 128, 256, 512, 1024, 2048, 4096)
    assert query.span("--devices", "48..100") == (48, 96, 100)
    assert query.span("--sequence", "8k..32k") == (8192, 16384, 32768)
    assert query.span("--sequence", "8192") == (8192,)


def test_a_thousand_is_1024_of_a_sequence_and_1000_of_a_run() -> None:
    assert query.whole("--sequence", "1M") == 1 << 20
    assert query.tokens("--tokens", "15T") == 15e12
    assert query.tokens("--tokens", "300B") == 3e11


def test_parts_of_a_strategy_are_one_value_or_several() -> None:
    assert query.fixed(("tensor_x=8", "recompute=full,none")) == {
        "tensor_x": "8",
        "recompute": ["full", "none"],
    }


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "", "8q", "4096..64", "0..8"])
def test_what_is_no_number_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--devices"):
        query.span("--devices", text)


@pytest.mark.parametrize("text", ["tensor_x", "=8", "tensor_x="])
def test_what_is_no_part_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        query.fixed((text,))
