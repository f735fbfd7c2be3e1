"""Inference: continuous batching over a paged KV cache, on unmodified Transformers models.

`Generator` is the interface; `engine` runs passes, `scheduler` composes them, `kv_pages` holds keys and values.
"""

from hyper_parallel.inference.generator import Generator
from hyper_parallel.inference.request import Completion, Request

__all__ = ["Completion", "Generator", "Request"]
