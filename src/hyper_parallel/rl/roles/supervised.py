"""Prompts and answers of a task as samples: for supervised steps before reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.data import Tokenizer
from hyper_parallel.data.character_tokenizer import encode
from hyper_parallel.rl.sample import Sample


def supervised_samples(rows: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Sample]:
    """An answer is followed by the token that ends it. Raises DataError for a character without a token."""
    found = []
    for row, (prompt, answer) in enumerate(rows):
        ids = (*tokenizer.beginning, *encode(tokenizer.transformers, prompt))
        tokens = (*encode(tokenizer.transformers, answer), tokenizer.eos)
        found.append(
            Sample(
                ticket=row,
                place=0,
                row=row,
                prompt=ids,
                tokens=tokens,
                logprobs=(0.0,) * len(tokens),
                versions=(0,) * len(tokens),
                drawn=(True,) * len(tokens),
                ended=True,
            )
        )
    return found
