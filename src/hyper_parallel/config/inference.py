"""`inference` section: how answers are drawn, how requests share a pass; `workload` section: the requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hyper_parallel.strategy.section import Section
from hyper_parallel.workload.shape import LARGEST

USUAL_TOKENS = 256
"""Tokens of an answer, at most, where nothing says how many."""


class Drawing(Section):
    """How tokens are chosen. The order of the steps is that of Transformers: repetition penalty, temperature, top-k,
    top-p."""

    temperature: float = Field(default=0.0, ge=0.0)
    """0 takes the most likely token (greedy); above it, logits are divided by it and a token is drawn."""
    top_k: int | None = Field(default=None, ge=1, strict=True)
    """Draw from the k most likely tokens only."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Draw from the fewest tokens whose probabilities add up to this (nucleus sampling, Holtzman et al. 2019)."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Divide positive logits of tokens that were in the prompt or answer by this, and multiply negative ones (CTRL,
    Keskar et al. 2019)."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """An answer ends before any of these strings, in which names of special tokens stand for these tokens. It also ends
    at the tokens of the model's generation config."""
    logprobs: bool | Literal["drawn"] = False
    """Return the log-probability of each token: under the model (`true`), or at the temperature at which it was drawn
    (`drawn`)."""

    @property
    def unfiltered(self) -> bool:
        """Whether a token is drawn from all, by the model's own logits."""
        return self.repetition_penalty == 1 and self.top_k is None and (self.top_p is None or self.top_p == 1)


class Sampling(Drawing):
    """How the tokens of one answer are chosen, and how many."""

    max_tokens: int = Field(default=USUAL_TOKENS, ge=1, strict=True)
    """Tokens of an answer, at most."""


class Inference(Drawing):
    """Generation: how answers are drawn, and how requests share the device."""

    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    """Tokens of an answer, at most. Default: 256, or fewer where the prompt leaves the model fewer positions."""

    n: int = Field(default=1, ge=1, strict=True)
    """Answers to each prompt."""
    seed: int = Field(default=0, ge=0, strict=True)
    """Random numbers are a function of (seed, prompt, answer, token)."""
    batch: int = Field(default=64, ge=1, strict=True)
    """Requests that generate at once, at most."""
    page: int = Field(default=32, ge=1, le=4096, multiple_of=16, strict=True)
    """Tokens of a page of the KV cache. Prompts are read in pieces of this many tokens."""
    rows: int = Field(default=128, ge=32, multiple_of=32, strict=True)
    """Tokens of a pass through the model, at most: one for each generating request, and pieces of prompts."""
    kv_dtype: Literal["int8"] | None = None
    """Of the keys and values in the cache's pages: `int8`, each token and head with scales, or by default the dtype of
    the model."""
    special_tokens_in_text: bool = True
    """Names of special tokens in a text prompt are these tokens, as in the tokenizer's own call. `false` reads them as
    ordinary text, for prompts of people who are not trusted."""
    prefix_cache: bool = True
    """Prompts with a common beginning share its pages, whole pages of it."""
    pages: int | None = Field(default=None, ge=1, strict=True)
    """Pages of the KV cache; by default those that `batch` of the longest requests need."""

    @model_validator(mode="after")
    def _pieces_fit(self) -> Inference:
        if self.rows < self.page:
            raise ValueError(
                f"'rows' ({self.rows}) is the tokens of a pass, and a piece of a prompt has {self.page} ('page'); "
                "raise rows or lower page"
            )
        return self

    def sampling(self, room: int | None = None) -> Sampling:
        """How the tokens of one answer are chosen. `room`: positions that the model has behind the prompt."""
        drawing = {name: getattr(self, name) for name in Drawing.model_fields}
        usual = USUAL_TOKENS if room is None else max(1, min(room, USUAL_TOKENS))
        return Sampling(**drawing, max_tokens=self.max_tokens or usual)


class PredictedInference(Inference):
    """The same where time and memory are predicted."""

    @model_validator(mode="after")
    def _is_priced(self) -> PredictedInference:
        if self.kv_dtype is not None:
            raise ValueError(
                f"'kv_dtype' ({self.kv_dtype}) is not predicted: contexts are priced in the dtype of the model; leave "
                "it out of simulate and plan"
            )
        return self


_Count = Annotated[int, Field(ge=1, le=LARGEST, strict=True)]
_Some = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class GenerationWorkload(Section):
    """Requests to generate for. A conversation is a request with `turns` above 1: each further prompt is everything
    before it and `message_tokens` more."""

    requests: _Count = 32
    """Conversations, over all devices."""
    prompt_tokens: _Count = 1024
    """Tokens of a first prompt."""
    answer_tokens: _Count = 256
    """Tokens of each answer."""
    shared_tokens: _Some = 0
    """Tokens at the beginning of a prompt that it has in common with others, such as a system prompt."""
    shared_prompts: _Count = 1
    """Different such beginnings; equally many requests that follow one another have each."""
    turns: _Count = 1
    """Prompts of a conversation."""
    message_tokens: _Count = 256
    """Tokens that each further prompt of a conversation adds."""
    idle_seconds: _Number = 0.0
    """Seconds between an answer and the next prompt of its conversation."""
    rate: _Number = 0.0
    """Conversations that begin per second, evenly spread; 0: all at once."""
    expert_skew: _Number = 0.0
    """Exponent of a Zipf distribution of the loads of a layer's experts; 0: all are chosen equally often."""
    selected_tokens: _Some = 0
    """Tokens of a context that sparse attention reads for each new token, whatever its length; 0: all of them."""
    selected_again: float = Field(default=0.9, ge=0.0, le=1.0)
    """Share of them that the token before selected too; these are on the device already."""

    @model_validator(mode="after")
    def _shares_a_part(self) -> GenerationWorkload:
        if self.shared_tokens > self.prompt_tokens:
            raise ValueError(
                f"'shared_tokens' ({self.shared_tokens}) is a part of 'prompt_tokens' ({self.prompt_tokens}); "
                "lower it, or "
                "raise prompt_tokens"
            )
        return self

    @property
    def context(self) -> int:
        """Tokens of the longest context: the last turn's prompt and answer."""
        return self.prompt_of(self.turns - 1) + self.answer_tokens

    def prompt_of(self, turn: int) -> int:
        """Tokens of the prompt of a turn, counted from 0."""
        return self.prompt_tokens + turn * (self.answer_tokens + self.message_tokens)

    @property
    def answers(self) -> int:
        """Answers of all conversations."""
        return self.requests * self.turns
