"""Inference: continuous batching over a paged KV cache, on unmodified Transformers models.

`Generator` is the interface; `engine` runs passes, `scheduler` composes them, `kv_cache` holds keys and values.
`TieredCache` is for Transformers' own `generate`.
"""

from hyper_parallel.inference.generator import Generator
from hyper_parallel.inference.request import Completion, Request
from hyper_parallel.inference.tiered_cache.cache import TieredCache, TieredCacheReport

__all__ = ["Completion", "Generator", "Request", "TieredCache", "TieredCacheReport"]
