"""`workload` section: the requests for which generation is predicted or planned."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from hyper_parallel.strategy.section import Section
from hyper_parallel.workload.shape import LARGEST

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
