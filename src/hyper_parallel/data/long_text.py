"""Ids of a long text, window by window, where they are provably those of the whole text.

Encoding takes about 200 bytes of memory for each character. Byte-level BPE splits a text into words by the regular
expression of GPT-2 (Radford et al. 2019), and encodes each word by itself:

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

or by a newer one of the same make (Llama 3, Qwen 2, GPT-4o). Where a word begins, nothing depends on what was before,
since the expression does not look behind; and where it ends is decided by the runs of letters, digits, signs and white
space that it reaches, and by three characters behind them. A run that a window cuts is its last word, or its last two
where it is white space with line breaks. So a window may begin where any word of the window before begins, its last one
and `MARGIN` apart, and the words are those of the whole text.

Three things look further and are excluded: normalizers (NFC apart, of a text that is in that form: so is each part of
it, Unicode Standard Annex #15, section 1.3), added tokens that depend on what stands beside them, and spaces put before
a text. `provable` looks at the tokenizer's own description, and says no to everything else.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

from hyper_parallel.errors import DataError
from hyper_parallel.proc import MEMORY, bytes_in

WINDOW = 2**20
"""Characters."""
MARGIN = 2**10
"""Characters at the end of a window that are encoded again: there the name of an added token may be cut."""
_BYTES_A_CHARACTER = 200

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_EXPRESSIONS = (
    # Llama 3 and Qwen 2.
    rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    # GPT-4o and gpt-oss.
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)


def provable(backend: Any) -> bool:
    """Whether the ids of windows are those of the whole text, for a tokenizer of the library `tokenizers`."""
    state = json.loads(backend.to_str())
    normalizer, model = state["normalizer"], state["model"]
    return (
        (normalizer is None or normalizer["type"] == "NFC")
        and _splits_by_runs(state["pre_tokenizer"] or {})
        and model["type"] == "BPE"
        and not model.get("dropout")
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or len(token["content"]) > MARGIN // 4
            for token in state["added_tokens"]
        )
    )


def _splits_by_runs(splitter: dict[str, Any]) -> bool:
    """Whether a text is split into words by one of the expressions above, and changed in no other way."""
    steps = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    *before, last = steps
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    if not before:
        return bool(last["use_regex"])
    return not last["use_regex"] and before in (
        [{"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}]
        for expression in _EXPRESSIONS
    )


def is_provable_text(backend: Any, text: str) -> bool:
    """Whether the normalizer of a `provable` tokenizer leaves the text as it is."""
    return backend.normalizer is None or unicodedata.is_normalized("NFC", text)


def ids_by_windows(
    encode: Callable[[str], Any], text: str, window: int = WINDOW, margin: int = MARGIN
) -> list[int]:
    """The ids of a text without what the tokenizer adds. `encode` gives the library's Encoding of a text."""
    ids: list[int] = []
    start, size = 0, window
    while True:
        encoding = encode(text[start : start + size])
        if start + size >= len(text):
            return [*ids, *encoding.ids]
        count = _complete(encoding, size - margin)
        if count:
            ids += encoding.ids[:count]
            start, size = start + encoding.offsets[count][0], window
        else:  # one word fills the window
            size *= 2


def check_memory(texts: list[str]) -> None:
    """Raise DataError if a text that is encoded as a whole does not fit this machine's memory."""
    available = bytes_in(MEMORY, "MemAvailable")
    longest = max(map(len, texts), default=0)
    if available is not None and longest > 16 * WINDOW and longest * _BYTES_A_CHARACTER > available:
        raise DataError(
            f"a text has {longest:,} characters, and to encode it takes about {longest * _BYTES_A_CHARACTER / 1e9:.0f} "
            f"GB of memory, with {available / 1e9:.0f} GB available; write it as several documents, a file each or one "
            "a line of JSONL"
        )


def _complete(encoding: Any, limit: int) -> int:
    """The number of tokens before the last word that begins within `limit` characters and is not the window's last."""
    words, offsets = encoding.word_ids, encoding.offsets
    for at in range(len(words) - 1, 0, -1):
        if offsets[at][0] <= limit and words[at] != words[at - 1] and words[at] != words[-1]:
            return at
    return 0
