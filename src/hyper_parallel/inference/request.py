"""Requests and completions: what one prompt asks of the engine, and what it gets."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hyper_parallel.config.inference import Sampling

Finish = Literal["stop", "length"]
"""Why an answer ended: a stop token or string, or `max_tokens`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, as token ids, with how its answer is drawn: token i is a function of (seed, row, sample, i). `row`
    stands for the prompt: a digest of its ids (`row_of`), or a number that the caller gives it; `sample` numbers the
    answers to one."""

    ids: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    row: int = 0
    sample: int = 0
    answered: int = 0
    """The last of `ids` that are its answer's first tokens already, behind which it goes on."""

    def pages(self, page: int) -> int:
        """Pages of its prompt and its longest answer but the last token, which is not read."""
        return -(-(len(self.ids) - self.answered + self.sampling.max_tokens - 1) // page)


def row_of(ids: Sequence[int]) -> int:
    """A prompt's `row` where its answers are to be a function of the prompt, wherever it stands among others."""
    return int.from_bytes(hashlib.blake2b(array("q", ids).tobytes(), digest_size=7).digest())


@dataclass(kw_only=True)
class Completion:
    """An answer: its token ids, its text, and the natural logarithm of each token's probability under the model (before
    temperature and filters; or as `Sampling.logprobs` says), where asked for."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish = "length"
    logprobs: list[float] | None = None
