"""Pinned prompts: the pages that beginnings of prompts fill stay on the device, whatever else needs memory.

A page is computed by the first request that begins with it, and is counted beside the pages that requests need
(`KVCacheSizes.pinned`), so that what is pinned takes no memory from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.kv_cache.page_pool import filled_keys
from hyper_parallel.inference.request import Request


@contextmanager
def pinned_prompts(engine: Engine, requests: Sequence[Request], settings: Inference) -> Iterator[None]:
    """Inside, the prompts of these requests are pinned. Raises ConfigError for one that fills no page, for pages that
    are not shared, and for a budget that is too small."""
    page, cache = engine.page, engine.cache
    if not settings.prefix_cache:
        raise ConfigError(
            "pinned: inference.prefix_cache is false, and prompts share no pages then; leave it out"
        )
    if short := [len(one.ids) for one in requests if len(one.ids) < page]:
        raise ConfigError(
            f"pinned: {short[0]} tokens fill no page of {page} tokens; pin a longer beginning, or lower inference.page"
        )
    cache.check_idle()
    keys = {key for one in requests for key in filled_keys(one.ids, page)}
    cache.pin(keys)
    try:
        if engine.fit is not None:
            engine.fit(engine, requests, settings)
        yield
    finally:
        cache.unpin(keys)
