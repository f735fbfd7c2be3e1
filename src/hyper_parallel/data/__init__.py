"""Text in, batches out: sources, tokenizer, tokenized corpus, packing and order.

`TextData` reads what the `data` section declares; `PackedText` is rows of token ids; `Order` says which row
is next.
"""

from hyper_parallel.data.order import Order
from hyper_parallel.data.packing import PackedText
from hyper_parallel.data.text import TextData
from hyper_parallel.data.tokenizer import Tokenizer

__all__ = ["Order", "PackedText", "TextData", "Tokenizer"]
