"""A tokenizer with a token for each character: for small tasks on digits and letters."""

from __future__ import annotations

from typing import Any

from hyper_parallel.data.tokenizer import END_OF_TEXT, PAD
from hyper_parallel.errors import DataError


def character_tokenizer(characters: str) -> Any:
    """Transformers' fast tokenizer: end of text is 0, padding 1, and then the characters in their order.

    Raises DataError for a character that comes twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    twice = next((one for place, one in enumerate(characters) if one in characters[:place]), None)
    if twice is not None or not characters:
        what = "is empty" if twice is None else f"has {twice!r} twice"
        raise DataError(f"characters: the list {what}; write each character of the task once")
    vocabulary = {token: number for number, token in enumerate([END_OF_TEXT, PAD, *characters])}
    # Without a token for what is unknown, which would stand for any character; encoding one raises.
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END_OF_TEXT, pad_token=PAD)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text. Raises DataError for a character that the tokenizer does not have."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises no narrower one
        raise DataError(
            f"the tokenizer has no token for a character of {text!r}; add it to 'characters'"
        ) from error
    return ids
