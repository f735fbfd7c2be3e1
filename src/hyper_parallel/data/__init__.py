"""Data pipeline: sources, tokenizer, tokenized corpus, packing and order.

`TextData` reads the text that the `data` section declares; `PackedText` is rows of token ids; `Order` is the sequence
of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.data.order import Order
    from hyper_parallel.data.packing import PackedText
    from hyper_parallel.data.text import TextData
    from hyper_parallel.data.tokenizer import Tokenizer

__all__ = ["Order", "PackedText", "TextData", "Tokenizer"]

# These need torch; the command that only looks for the declared files (`data.sources`) does not pay for it.
_HOME = {"Order": "order", "PackedText": "packing", "TextData": "text", "Tokenizer": "tokenizer"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
