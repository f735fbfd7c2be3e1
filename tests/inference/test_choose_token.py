"""Filters leave what Transformers' logits processors leave, and draws follow the probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as processors

from hyper_parallel.config.inference import Sampling
from hyper_parallel.inference.sampler import choose, choose_plainly, draw_of, filtered, penalized


def logits(seed: int, size: int = 97) -> torch.Tensor:
    return 4 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.9}, {"top_p": 1e-9}]
)
def test_filters_are_those_of_transformers(seed: int, settings: dict[str, Any]) -> None:
    scores = logits(seed).double()
    expected = scores[None]
    if "top_k" in settings:
        expected = processors.TopKLogitsWarper(settings["top_k"])(None, expected)
    if "top_p" in settings:
        expected = processors.TopPLogitsWarper(settings["top_p"])(None, expected)
    assert torch.equal(filtered(scores, Sampling(**settings)), expected[0])


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    seen = [3, 5, 5, 90]
    expected = processors.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits(0)[None])[0]
    assert torch.equal(penalized(logits(0), seen, penalty), expected)


def test_draws_follow_the_probabilities() -> None:
    scores, sampling = logits(3, 7), Sampling(temperature=2.0)
    found = torch.bincount(
        torch.tensor([choose(scores, sampling, [], draw_of(0, 0, 0, token)) for token in range(20000)]),
        minlength=7,
    )
    assert (found / 20000 - (scores / 2).softmax(-1)).abs().max() < 0.01


def test_the_ends_of_the_interval() -> None:
    scores = torch.tensor([float("-inf"), 1.0, 1.0, float("-inf")])
    sampling = Sampling(temperature=1.0)
    assert choose(scores, sampling, [], 0.0) == 1
    assert choose(scores, sampling, [], 1 - 2**-53) == 2


def test_greedy_with_a_penalty() -> None:
    scores = torch.tensor([1.0, 1.1])
    assert choose(scores, Sampling(), [1], 0.5) == 1
    assert choose(scores, Sampling(repetition_penalty=2.0), [1], 0.5) == 0


def test_many_rows_at_once_are_chosen_as_one_by_one() -> None:
    """Tokens without probability, a draw at the end, and different temperatures included."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 37, generator=generator) * 4
    logits[::7, 30:] = float("-inf")
    logits[::11, :5] = float("-inf")
    draws = torch.rand(200, generator=generator, dtype=torch.float64)
    draws[::5] = 1 - 2**-53
    temperatures = torch.rand(200, generator=generator, dtype=torch.float64) * 2 + 0.1
    found = choose_plainly(logits, temperatures, draws)
    assert found == [
        choose(row, Sampling(temperature=float(temperature)), [], float(draw))
        for row, temperature, draw in zip(logits, temperatures, draws, strict=True)
    ]
    assert len(set(found)) > 20
