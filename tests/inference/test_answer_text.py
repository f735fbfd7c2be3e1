"""Stop strings, beside Transformers' own criterion."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from transformers import StopStringCriteria

from harness import chat_model
from hyper_parallel.data import Tokenizer
from hyper_parallel.inference.request import before_stop

SPECIAL = ("<|im_start|>", "<|im_end|>")


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(chat_model.tokenizer())


def _named(ids: list[int]) -> str:
    return _tokenizer().decode(ids, special=True)


def _answer(draws: random.Random) -> list[int]:
    """Tokens of words, bytes and special tokens."""
    own = _tokenizer().transformers
    special = [own.convert_tokens_to_ids(name) for name in SPECIAL]
    words = own("Blue, as the sea. Four, I am sure. ü ß 日", add_special_tokens=False).input_ids
    return [draws.choice(special if draws.random() < 0.15 else words) for _ in range(draws.randint(4, 24))]


def _part(draws: random.Random, text: str) -> str:
    """A piece of a text, which begins and ends anywhere."""
    start = draws.randrange(len(text))
    return text[start : start + draws.randint(1, 12)]


def test_an_answer_ends_where_it_does_in_transformers() -> None:
    """500 stop strings, across the limits of tokens and with names of special tokens."""
    draws, found = random.Random(0), 0
    for _ in range(500):
        answer = _answer(draws)
        text = _named(answer)
        parts = [_part(draws, text) for _ in range(draws.choice((1, 1, 3)))]
        stops = [part for part in parts if "\N{REPLACEMENT CHARACTER}" not in part]
        if not stops:
            continue
        criterion: Any = StopStringCriteria(_tokenizer().transformers, stops)
        for count in range(1, len(answer) + 1):
            begun = answer[:count]
            own = bool(criterion(torch.tensor([begun]), torch.zeros(1, 1)))
            shown = before_stop(begun, stops, _tokenizer().decode)
            assert (shown is not None) == own, (stops, _named(begun))
            if shown is not None:
                found += 1
                end = min(place for stop in stops if (place := _named(begun).find(stop)) >= 0)
                before = _named(begun)[:end]
                for name in SPECIAL:
                    before = before.replace(name, "")
                # Of a string that begins inside of a special token's name, nothing of the name is shown.
                assert before.startswith(shown) and before[len(shown) :] in ("", *_beginnings())
                break
    assert found > 300


def _beginnings() -> list[str]:
    return [name[:length] for name in SPECIAL for length in range(1, len(name))]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|im_end|>", "Blue"),
        ("<|im_end|>,", "Blue"),
        ("ue<|im_end|>", "Bl"),
        (",", "Blue"),
        ("im_end", "Blue"),
    ],
)
def test_special_tokens_are_found_by_their_names_and_are_no_part_of_the_text(stop: str, text: str) -> None:
    own = _tokenizer().transformers
    ids = own("Blue<|im_end|>,", add_special_tokens=False).input_ids
    assert (
        next(
            found
            for count in range(1, len(ids) + 1)
            if (found := before_stop(ids[:count], [stop], _tokenizer().decode)) is not None
        )
        == text
    )
