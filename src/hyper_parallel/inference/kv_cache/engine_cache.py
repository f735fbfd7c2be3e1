"""The KV cache of an engine's runs: its own for each run, or, with sizes and tiers, one that outlives them.

Prefixes that outlive a run hold for the weights that computed them. Before a run, the weights are compared with those
of the run before (`weights.fingerprint`), and all prefixes are dropped unless they are the same.

Prompts that are pinned need a cache that outlives runs. Without sizes, it has the pages of the largest run until now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.inference.kv_cache.kv_memory import KVMemory
from hyper_parallel.inference.kv_cache.page_pool import PagePool
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache
from hyper_parallel.inference.kv_cache.pages import shape_of
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes, LayerShape
from hyper_parallel.inference.kv_cache.tiers import CacheReport
from hyper_parallel.inference.rank_groups import Agreement
from hyper_parallel.inference.request import Request
from hyper_parallel.inference.scheduler import Scheduler, pages_for
from hyper_parallel.inference.weights.fingerprint import Fingerprint
from hyper_parallel.offloading.tiers import Tier
from hyper_parallel.shard.sharded_model import is_sharded


@dataclass(frozen=True)
class _Budget:
    sizes: KVCacheSizes
    tiers: Callable[[], Mapping[str, Tier]]


class RunCache:
    """Makes the cache and the scheduler of each run."""

    def __init__(
        self, model: Any, layers: int, page: int, stored: int | None = None, *, int8: bool = False
    ) -> None:
        """`page`: tokens of a page; `stored`: those that this process stores, by default all. `int8`: as
        `PagedCache` has it."""
        self._int8 = int8
        self._model, self._layers, self._page = model, layers, page
        self.stored = page if stored is None else stored
        """Tokens of a page that this process stores."""
        self._like: dict[int, tuple[Tensor, Tensor]] = {}
        self.agreement = Agreement()
        """Between the ranks that run the same passes."""
        self._shapes: tuple[tuple[LayerShape, ...], tuple[LayerShape, ...]] = ((), ())
        """This rank's own, and those that were agreed on."""
        self._linear: dict[int, bool | None] = {}
        """Of the layers that compute with cached values (`Latents`)."""
        self._budget: _Budget | None = None
        self._pins = Counter[bytes]()
        """Keys of pages that are pinned, with how often."""
        self._for_pins = False
        """Whether the cache outlives runs for the sake of these alone."""
        self._open: tuple[PagedCache, PagePool, KVMemory] | None = None
        self._separate: list[PagedCache] = []
        """Of the runs under way that have their own."""
        self._weights: object = None
        self._busy = 0
        self._report = CacheReport()
        self._shared: Callable[[], int] = lambda: 0
        self.spare = True
        """Whether memory may be taken for what only saves time: not where bytes are counted."""
        self.version: Callable[[], object] = Fingerprint(model)
        """Something that is equal only as long as the weights are the same; None where that is not known."""

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shapes that each layer caches for a token, known after the first pass; of ranks that run the same passes
        the most heads that one has. A collective of these when it is asked for the first time after a pass."""
        own = tuple(shape_of(*like, int8=self._int8) for like in self._like.values())
        if self._shapes[0] != own:
            heads = self.agreement.largest([count for one in own for count in (one.keys[0], one.values[0])])
            self._shapes = (
                own,
                tuple(
                    replace(one, keys=(keys, one.keys[1]), values=(values, one.values[1]))
                    for one, keys, values in zip(own, heads[::2], heads[1::2], strict=True)
                ),
            )
        return self._shapes[1]

    @property
    def report(self) -> CacheReport:
        """Figures of the run under way or the last one. Bytes are those since the tiers were opened."""
        found = self._report if self._open is None else self._open[2].report()
        pinned = 0 if self._open is None else self._open[1].pinned
        return replace(found, shared=self._shared(), pinned=pinned)

    @property
    def resident(self) -> int:
        """Bytes on the device: of the runs under way, and of the cache that outlives them."""
        opened = [] if self._open is None else [self._open[0]]
        return sum(one.bytes for one in (*self._separate, *opened))

    @property
    def pinned(self) -> int:
        """Pages that are pinned, whether they are there or not."""
        return len(self._pins)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Pages with these keys stay on the device until they are unpinned as often."""
        self._pins.update(keys)
        if self._open is not None:
            self._open[1].pin(self._pins)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """End what `pin` began."""
        before = set(self._pins)
        self._pins = +(self._pins - Counter(keys))
        if self._open is not None:
            self._open[1].unpin(before - set(self._pins))
        if self._for_pins and not self._pins and not self._busy:
            self.separate()

    def _keep_for_pins(self, requests: Sequence[Request], settings: Inference) -> None:
        """Without sizes: see that a cache with pages for a run and for what is pinned outlives it."""
        if self._for_pins and not self._pins:
            self.check_idle()
            self.separate()
        if not self._pins or (self._budget is not None and not self._for_pins):
            return
        self.check_idle()
        pages = settings.pages or pages_for(requests, settings.batch, self._page)
        self._check(requests, pages)
        known = KVCacheSizes(device=0) if self._budget is None else self._budget.sizes
        if pages > known.device or len(self._pins) > known.pinned:
            self.configure(KVCacheSizes(device=max(pages, known.device), pinned=len(self._pins)), dict)
            self._for_pins = True

    def configure(self, sizes: KVCacheSizes, tiers: Callable[[], Mapping[str, Tier]]) -> None:
        """From now on, runs share a cache of these sizes. `tiers` opens those that have pages, the fastest first, when
        the next run begins; they are closed by `close`."""
        self.close()
        self._budget, self._for_pins = _Budget(sizes, tiers), False

    def separate(self) -> None:
        """From now on, each run has its own cache, without tiers."""
        self.close()
        self._budget, self._for_pins = None, False

    def check_idle(self) -> None:
        """Raise ConfigError while a run is under way."""
        if self._busy:
            raise ConfigError(
                "a run of this Generator is under way, and runs share its memory; go through its answers, or close it, "
                "before the next one"
            )

    def close(self) -> None:
        """Give up what outlives runs, and close the tiers."""
        if self._open is not None:
            opened, self._open = self._open, None
            self._report = opened[2].report()
            opened[2].close()

    def fresh(self, sizes: KVCacheSizes, *, keep: bool = False, exact: bool = False) -> PagedCache:
        """An empty cache. `keep`: for one run, in which weights stay the same. `exact`: in the dtype of the model, also
        where runs have int8 pages."""
        whole = self.stored == self._page
        int8 = self._int8 and not exact
        cache = PagedCache(self._layers, sizes, self.stored, int8=int8, absorb=whole, keep=keep)
        for layer, linear in self._linear.items():
            cache.layers[layer].expand = True
            cache.layers[layer].latents.linear = linear
        return cache

    def zeros(self, sizes: KVCacheSizes) -> PagedCache:
        """A cache of zeros, for passes that read rows which none has written. After the first pass."""
        cache = self.fresh(sizes)
        cache.make(self._like)
        for store in cache.stores:
            store.zero_()
        return cache

    def learn(self, cache: PagedCache) -> None:
        """Take note of what a pass showed of the layers."""
        self._linear = {layer.layer: layer.latents.linear for layer in cache.layers if layer.expand}
        self._like.update(cache.like())

    @contextmanager
    def run(self, requests: Sequence[Request], settings: Inference) -> Iterator[tuple[PagedCache, Scheduler]]:
        """The cache and the scheduler of a run of these requests. Raises DataError for a request that needs more memory
        than there is, TierError."""
        self._keep_for_pins(requests, settings)
        memory: KVMemory | None = None
        if self._budget is None:
            cache, pool = self._own(requests, settings)
        else:
            self.check_idle()
            cache, pool, memory = self._opened()
            self._check_tiered(requests, memory)
            cache.prepare(max(memory.sizes.staging, self._longest(requests) * self.stored))
            pool.reuse = settings.prefix_cache
        scheduler = self._scheduler(settings, pool, memory)
        self._shared = lambda: scheduler.shared
        scheduler.tails.copy = cache.copy_page
        scheduler.waiting.extend(enumerate(requests))
        self._busy += 1
        try:
            yield cache, scheduler
            if memory is not None:
                memory.settle()
        except GeneratorExit:
            scheduler.stop()
            raise
        except BaseException:
            # What pages hold is not known any more.
            self.close()
            raise
        finally:
            self._busy -= 1
            shared = scheduler.shared
            self._shared = lambda: shared
            if memory is None:
                # The pages go now, and not with the scheduler.
                self._separate = [one for one in self._separate if one is not cache]
                cache.clear()

    def _own(self, requests: Sequence[Request], settings: Inference) -> tuple[PagedCache, PagePool]:
        """A cache for one run."""
        pages = settings.pages or pages_for(requests, settings.batch, self._page)
        staging = self._check(requests, pages) * self.stored
        cache = self.fresh(KVCacheSizes(device=pages, staging=staging), keep=self.spare)
        self._separate.append(cache)
        return cache, PagePool(pages, settings.prefix_cache)

    def _scheduler(self, settings: Inference, pool: PagePool, memory: KVMemory | None = None) -> Scheduler:
        scheduler = Scheduler(settings.batch, settings.rows, self._page, pool, memory)
        if not self.spare:
            # The workspace was measured with a segment of each request.
            scheduler.segments = settings.batch
        return scheduler

    def _opened(self) -> tuple[PagedCache, PagePool, KVMemory]:
        assert self._budget is not None
        weights = self.version()
        if self._open is None:
            cache = self.fresh(self._budget.sizes)
            cache.make(self._like)
            sizes = self._budget.sizes
            pool = PagePool(sizes.device + sizes.pinned)
            pool.pin(self._pins)
            tiers = self._budget.tiers()
            try:
                memory = KVMemory(
                    cache,
                    pool,
                    self._page,
                    tiers,
                    self.shapes,
                    stored=self.stored,
                    ordered=is_sharded(self._model),
                )
            except BaseException:
                for tier in tiers.values():
                    tier.close()
                raise
            self._open = cache, pool, memory
        elif weights is None or weights != self._weights:
            self._open[2].forget()
        self._weights = weights
        self._open[2].begin()
        return self._open

    def _longest(self, requests: Sequence[Request]) -> int:
        return max((one.pages(self._page) for one in requests), default=0)

    def _check(self, requests: Sequence[Request], pages: int) -> int:
        most = self._longest(requests)
        if most > pages:
            raise DataError(
                f"a request needs {most} pages of {self._page} tokens, and inference.pages is {pages}; raise it, or "
                "lower inference.max_tokens"
            )
        return most

    def _check_tiered(self, requests: Sequence[Request], memory: KVMemory) -> None:
        most, sizes = self._longest(requests), memory.sizes
        if most > sizes.device < memory.least:
            raise DataError(
                f"the KV cache has {sizes.device} pages on the device and needs {memory.least}; raise memory.device"
            )
        if most > sizes.device and memory.blocks_of(most) > memory.tiers.slots:
            raise DataError(
                f"a request needs {most} pages of {self._page} tokens, and the KV cache has {sizes.device} on the "
                f"device and {memory.tiers.slots * sizes.block} in tiers, of which it needs "
                f"{memory.blocks_of(most) * sizes.block}; raise memory.device, host or pool, or lower "
                "inference.max_tokens"
            )
        if sizes.staging and most * self.stored > sizes.staging:
            raise DataError(
                f"a request has up to {most * self.stored} tokens, and the staging buffers have {sizes.staging}; raise "
                "memory.device, or lower inference.max_tokens"
            )
