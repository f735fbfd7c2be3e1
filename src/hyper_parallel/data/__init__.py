"""Data pipeline: sources, tokenizer, tokenized corpus, packing and order.

`load_data` reads what the `data` section declares: `TextData`, or `MultimodalData` where there are images or sound.
`PackedText` is rows of token ids, `Rows` what a loop asks of any rows; `Order` is the sequence of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.data.load import TextData, TrainingData, load_data
    from hyper_parallel.data.multimodal import MultimodalData
    from hyper_parallel.data.order import Order
    from hyper_parallel.data.packing import PackedText, Rows
    from hyper_parallel.data.tokenizer import Tokenizer

__all__ = [
    "MultimodalData",
    "Order",
    "PackedText",
    "Rows",
    "TextData",
    "Tokenizer",
    "TrainingData",
    "load_data",
]

# These need torch; the command that only looks for the declared files (`data.sources`) does not pay for it.
_HOME = {
    "MultimodalData": "multimodal",
    "Order": "order",
    "PackedText": "packing",
    "Rows": "packing",
    "TextData": "load",
    "Tokenizer": "tokenizer",
    "TrainingData": "load",
    "load_data": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
