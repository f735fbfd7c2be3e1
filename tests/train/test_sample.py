"""Sampling: the distribution that is drawn from, repeatability, long texts and the end of a text."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn

from hyper_parallel.train.sample import sample


class Letters:
    """A tokenizer of the digits: id i is the digit i; 9 ends a text."""

    eos, pad = 9, 0

    def decode(self, ids: list[int]) -> str:
        return "".join(map(str, ids))


class Successor(nn.Module):
    """The next token is one more than the last, or drawn from `shares` when they are given."""

    def __init__(self, shares: list[float] | None = None) -> None:
        super().__init__()
        self.shares, self.seen = shares, []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(input_ids.shape))
        if self.shares is not None:
            return torch.tensor(self.shares).log().expand(*input_ids.shape, -1)
        return nn.functional.one_hot((input_ids + 1) % 10, 10).float()


def _sample(model: nn.Module, prompt: str, tokens: int, **options: Any) -> str:
    return sample(
        model,
        Letters(),
        [int(letter) for letter in prompt],
        tokens,
        device=torch.device("cpu"),
        **{"sequence": 128, "stops": {9}, **options},
    )


def test_greedy_goes_on_from_the_prompt_and_stops_at_the_end_of_text() -> None:
    model = Successor()
    assert _sample(model, "12", 3) == "12345"
    assert _sample(model, "12", 20) == "12345678"
    assert set(model.seen) == {(1, 64)}  # every pass has one shape, however long the text is
    assert len(model.seen) == 23


def test_a_text_longer_than_the_context_sees_its_end() -> None:
    assert _sample(Successor(), "0012", 3, sequence=4) == "0012345"


def test_drawn_tokens_follow_the_distribution_and_the_seed() -> None:
    shares = [0.5, 0.3, 0.2, *[1e-9] * 7]
    text = _sample(Successor(shares), "0", 2000, temperature=1.0, seed=3)[1:]
    counts = collections.Counter(text)
    assert abs(counts["0"] / 2000 - 0.5) < 0.05 and abs(counts["2"] / 2000 - 0.2) < 0.04
    assert text == _sample(Successor(shares), "0", 2000, temperature=1.0, seed=3)[1:]
    assert text != _sample(Successor(shares), "0", 2000, temperature=1.0, seed=4)[1:]
    colder = collections.Counter(_sample(Successor(shares), "0", 2000, temperature=0.5, seed=3)[1:])
    assert abs(colder["0"] / 2000 - 0.25 / 0.38) < 0.05


def test_the_model_is_left_in_its_mode() -> None:
    model = Successor().train()
    _sample(model, "1", 1)
    assert model.training
