"""The factorisations that bytes choose, and the closed forms they are chosen by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tensor_costs import Shape, attention_cost, choose_attention, one_axis_cost
from hyper_parallel.shard.tensor.factorization import (
    Gathered,
    MlpFactors,
    MlpShape,
    choose_mlp,
    divisors,
    mlp_cost,
)

LLAMA_70B = Shape(hidden=8192, query=8192, kv=1024, head=128, between=28672)


@pytest.mark.parametrize(
    ("ranks", "attention", "mlp", "saved"),
    [
        (4, (2, 2), MlpFactors(1, 1), 0.146),
        (8, (2, 4), MlpFactors(1, 2), 0.223),
        (16, (4, 4), MlpFactors(2, 2), 0.375),
        (32, (4, 8), MlpFactors(2, 4), 0.508),
        (64, (8, 8), MlpFactors(4, 4), 0.631),
    ],
)
def test_choices_for_llama_70b(ranks: int, attention: tuple[int, int], mlp: MlpFactors, saved: float) -> None:
    x, y = choose_attention(LLAMA_70B, ranks)
    assert (x, y) == attention
    chosen = choose_mlp(8192, 28672, 2, x, y)
    assert chosen == mlp
    ours = attention_cost(LLAMA_70B, x, y) + mlp_cost(LLAMA_70B, x, y, chosen)
    assert float(1 - ours / (2 * one_axis_cost(LLAMA_70B, ranks))) == pytest.approx(saved, abs=5e-4)


@pytest.mark.parametrize(("gathered", "saved"), [("keep", 0.379), ("mlp", 0.307), ("again", 0.207)])
def test_what_keeping_buys_at_8(gathered: Gathered, saved: float) -> None:
    factors = choose_mlp(8192, 28672, 2, 2, 4, gathered)
    ours = attention_cost(LLAMA_70B, 2, 4, gathered) + mlp_cost(LLAMA_70B, 2, 4, factors, gathered)
    assert float(1 - ours / (2 * one_axis_cost(LLAMA_70B, 8, "again"))) == pytest.approx(saved, abs=5e-4)


@given(
    x=st.integers(1, 24),
    y=st.integers(1, 12),
    hidden=st.integers(1, 50),
    between=st.integers(1, 400),
    leading=st.integers(1, 2),
)
def test_choice_can_be_laid_out_and_is_no_worse_than_one_axis(
    x: int, y: int, hidden: int, between: int, leading: int
) -> None:
    factors = choose_mlp(hidden, between, leading, x, y)
    assert x % factors.down == 0
    assert factors.down % factors.up == 0
    assert factors.down == 1 or between % (x * y // factors.up) == 0
    shape = MlpShape(hidden, between, leading)
    assert mlp_cost(shape, x, y, factors) <= one_axis_cost(shape, x * y)


def test_one_axis_is_the_special_case_of_x_1() -> None:
    for ranks in (1, 2, 8):
        assert attention_cost(LLAMA_70B, 1, ranks) == one_axis_cost(LLAMA_70B, ranks)
        assert mlp_cost(LLAMA_70B, 1, ranks, MlpFactors(1, 1), "again") == one_axis_cost(
            LLAMA_70B, ranks, "again"
        )


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
