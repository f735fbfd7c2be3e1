"""The token ids of a prompt: of a text those of the tokenizer's own call, of a conversation those of its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.data import Tokenizer
from hyper_parallel.data.chat import prompt as rendered
from hyper_parallel.data.document import Chat
from hyper_parallel.errors import DataError

NO_TOKENS = "the prompt has no tokens; generation needs at least one to go on from"


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    *,
    special_tokens: bool = True,
) -> list[int]:
    """The ids of a text, or of the messages of a conversation up to the answer; a last message of the assistant is the
    answer's beginning. `options`: what the template gets beside the messages (`tools`, `documents` and others).
    `special_tokens`: whether names of special tokens in a text are these tokens.

    Raises DataError for a prompt without tokens, and for messages or options that the template does not take.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise DataError("the prompt is empty; generation needs at least one token to go on from")
        if not is_text(prompt):
            raise DataError("the prompt is no text: it has half of a character (a lone surrogate)")
        ids = tokenizer.encode(prompt, special_tokens=special_tokens)
    else:
        chat = Chat("messages", [dict(message) for message in prompt], options=dict(options or {}))
        ids = tokenizer.encode_template([rendered(tokenizer.transformers, chat)])[0][0]
    if not ids:
        raise DataError(NO_TOKENS)
    return ids


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8, which lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
