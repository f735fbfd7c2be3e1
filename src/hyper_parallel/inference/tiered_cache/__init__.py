"""`TieredCache`: a Transformers cache with a device budget, for Transformers' own `generate`."""

from hyper_parallel.inference.tiered_cache.cache import TieredCache, TieredCacheReport

__all__ = ["TieredCache", "TieredCacheReport"]
