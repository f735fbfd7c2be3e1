"""The text of an answer, and where a stop string ends it.

Stop strings are looked for in the text in which special tokens have their names, as Transformers' `stop_strings` do:
`<|im_end|>` is found, and no string is found across a special token that does not name it. Special tokens are no part
of an answer's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextOf(Protocol):
    """Gives the text of tokens: without special tokens, or with their names (`special`)."""

    def __call__(self, ids: list[int], /, special: bool = False) -> str: ...


def no_text(ids: list[int], /, special: bool = False) -> str:
    """Of answers whose tokens alone are asked for."""
    return ""


def before_stop(tokens: list[int], stops: Sequence[str], text_of: TextOf) -> str | None:
    """The text of an answer before the first stop string, if its last token completes one."""
    # A character has at most 4 bytes, and a token at least one.
    window = 4 * max(map(len, stops)) + 8
    recent = text_of(tokens[-window:], special=True)
    if not any(stop in recent for stop in stops):
        return None
    whole = text_of(tokens, special=True)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    if not places:
        return None
    end = min(places)
    for count in reversed(range(len(tokens))):
        named = text_of(tokens[:count], special=True)
        if len(named) <= end and whole.startswith(named):
            shown = text_of(tokens[:count])
            # The string begins inside of the next token, of which a special one shows nothing.
            is_special = text_of(tokens[: count + 1]) == shown
            return shown if is_special else shown + whole[len(named) : end]
    return whole[:end]
