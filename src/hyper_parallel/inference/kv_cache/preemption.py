"""Preemption by swapping: requests give up their device pages when others need them, and come back, the oldest first.

A request gets pages as it grows. Where none is free,

1. a streamed request (one that is longer than the device's memory) moves its oldest pages to a tier;
2. else the youngest of the running requests, if it is younger than the one that needs the page, is swapped out;
3. else the request itself is swapped out.

Where no tier has room, the request is computed again later: its prompt in the same pieces, and its answer token by
token, so that bits are the same. Nothing is taken from the oldest request, and it may take from all others: it ends,
and so does the next one. No request starts while another is swapped out.
"""

from __future__ import annotations

from collections.abc import Collection

from hyper_parallel.inference.kv_cache.kv_memory import KVMemory
from hyper_parallel.inference.kv_cache.page_pool import PagePool
from hyper_parallel.inference.running import Running


class Preemption:
    """Pages for the requests of `running`, a list that is the scheduler's too."""

    def __init__(self, running: list[Running], pool: PagePool, memory: KVMemory) -> None:
        self._running, self._pool, self._memory = running, pool, memory
        self.swapped: list[Running] = []
        """The oldest first."""

    def first(self, one: Running) -> int:
        """Pages with which a request starts: those of its prompt and one more, or the tail of a streamed one."""
        wanted = min(-(-len(one.request.ids) // one.page) + 1, one.longest)
        return min(wanted, self._memory.group + 1) if self._memory.streams(one) else wanted

    def resume(self, batch: int) -> None:
        """Bring requests back that were swapped out, the oldest first, while there is room for it and for each running
        request to grow."""
        while self.swapped and len(self._running) < batch:
            one = self.swapped[0]
            wanted = min(max(one.used + 1, self.first(one)), self._memory.sizes.device)
            if self._running and self._pool.available < wanted + len(self._running):
                return
            pages = self._pool.allocate(wanted)
            assert pages is not None, "a request that does not fit on the device"
            self.swapped.pop(0)
            one.pages = pages
            self._memory.swap_in(one)
            one.lay()
            self._running.append(one)
            self._running.sort(key=lambda one: one.number)

    def grow(self) -> None:
        """See that every request has pages for its next tokens, the oldest first, or is swapped out."""
        for one in list(self._running):
            if one in self._running and not one.arriving:
                self._grow(one)

    def stop(self) -> None:
        """Give up the requests that are swapped out, and wait for pages on their way."""
        for one in self._running:
            self._memory.finish(one)
        for one in self.swapped:
            self._memory.release(one)
        self.swapped.clear()

    def cancel(self, numbers: Collection[int]) -> None:
        """Give up those of some requests that are swapped out, and wait for pages of the others on their way."""
        for one in self._running:
            if one.number in numbers:
                self._memory.finish(one)
        for one in [one for one in self.swapped if one.number in numbers]:
            self._memory.release(one)
            self.swapped.remove(one)

    def _grow(self, one: Running) -> None:
        before = len(one.pages), one.base
        while one.cached + one.step > one.base + len(one.pages) * one.page:
            pages = self._pool.allocate(1, one.pages[-1] if one.pages else None)
            if pages is not None:
                one.pages += pages
            elif not self._make_room(one):
                return
        if (len(one.pages), one.base) != before:
            one.lay()

    def _make_room(self, one: Running) -> bool:
        """Free at least a page for a request; False where it was swapped out itself."""
        streams = self._memory.streams(one) and len(one.pages) >= self._memory.group
        if streams and self._memory.push(one):
            return True
        if streams and self._lose_youngest(one):
            return True
        youngest = self._running[-1]
        assert youngest is not one or len(self._running) > 1, "the oldest request finds no page"
        self._swap_out(youngest)
        return youngest is not one

    def _lose_youngest(self, one: Running) -> bool:
        """Free room in tiers for a request, of the youngest other one that has something there."""
        for other in [*reversed(self.swapped), *reversed(self._running)]:
            if other.number > one.number and (other.stored or other.older):
                if other in self._running:
                    self._running.remove(other)
                    self._enter(other)
                self._lose(other)
                return True
        return False

    def _swap_out(self, one: Running) -> None:
        self._memory.finish(one)
        self._running.remove(one)
        if one.cached > one.base and self._memory.swap_out(one):
            self._memory.counts["swapped"] += 1
            self._pool.release(one.pages)
            one.pages = []
        else:
            self._lose(one)
        self._enter(one)

    def _enter(self, one: Running) -> None:
        self.swapped.append(one)
        self.swapped.sort(key=lambda one: one.number)

    def _lose(self, one: Running) -> None:
        """Give up all that was computed of a request."""
        self._memory.finish(one)
        self._memory.release(one)
        self._pool.release(one.pages)
        self._memory.counts["recomputed"] += one.cached
        one.pages, one.cached, one.base = [], 0, 0
