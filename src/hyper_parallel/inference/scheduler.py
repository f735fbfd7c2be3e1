"""Continuous batching (Yu et al. 2022, Orca): which requests' tokens are in the next pass.

Requests are admitted in the order in which they came. Without tiers, a request starts when a place in the batch and all
the pages that it can ever need are free; so nothing that runs is preempted, and no request starves. With tiers, it
starts with pages for its prompt, and `preemption` finds further ones. Prompts are read in pieces on a grid from
position 0, which does not depend on what else runs: the same products in the same order in any company. A piece that
another request has computed is shared (`page_pool`); one that another request computes in this pass is waited for.
The same holds for the last piece of a prompt that gets several answers (`prompt_tails`).

Each request has a segment in a pass: its newest token, or a piece of its prompt. Further pieces of the oldest prompts
fill the rows that are left, so that a prompt takes few passes; a piece attends to those before it in the same pass,
whose keys and values each layer writes before it attends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from hyper_parallel.inference.kv_cache.kv_memory import KVMemory
from hyper_parallel.inference.kv_cache.page_pool import PagePool
from hyper_parallel.inference.ragged_pass import WIDE, Segment, pass_rows
from hyper_parallel.inference.request import First, PromptTails, Request, Running


class Scheduler:
    """Requests that wait and that run. `memory`: pages in tiers, where there are any."""

    def __init__(
        self, batch: int, rows: int, page: int, pool: PagePool, memory: KVMemory | None = None
    ) -> None:
        self.batch, self.rows, self.page, self.pool = batch, rows, page, pool
        self.shared = 0
        """Tokens of prompts whose pages were there."""
        self.row_length: Callable[[Sequence[Segment]], int] = _row_length
        """Rows of a pass over segments."""
        self.segments = rows
        """Segments of a pass, at most."""
        self.waiting: deque[tuple[int, Request]] = deque()
        self.running: list[Running] = []
        self.tails = PromptTails(pool)
        """Last pages of prompts that get several answers."""
        self.begin: Callable[[Running, First], bool] = lambda one, first: False
        """Gives a request its first token, which another one's pass has chosen; whether its answer ends with it."""
        self.ended: list[Running] = []
        """Requests that ended so; whoever asks for passes takes them off."""
        self._memory = memory
        self._preemption = Preemption(self.running, pool, memory) if memory is not None else None
        self._first: Running | None = None
        """The first of the waiting requests."""

    @property
    def started(self) -> list[Running]:
        """Requests that run, or that are swapped out."""
        return [*self.running, *(self._preemption.swapped if self._preemption is not None else ())]

    def admit(self) -> None:
        """Start waiting requests while there is a place and memory for the first of them."""
        if self._preemption is not None:
            self._preemption.resume(self.batch)
            if self._preemption.swapped:
                return
        while self.waiting and len(self.running) < self.batch:
            if self._first is None:
                self._first = Running.of(*self.waiting[0], self.page, self.pool.reuse)
            one = self._first
            if not self._start(one):
                return
            self.waiting.popleft()
            self._first = None
            self.running.append(one)

    def next_pass(self) -> list[tuple[Running, Segment]]:
        """What the next pass computes: the newest token of requests that generate, then pieces of prompts, the oldest
        request first. Empty when nothing runs, or while some have `ended` without one."""
        self.admit()
        for one in list(self.running):
            self._share(one)
            self._take_tail(one)
        if self.ended:
            return []
        if self._memory is not None:
            self._memory.finish_short()
        if self._preemption is not None:
            self._preemption.grow()
        found = self._compose()
        if not found and self._memory is not None and self.running:
            # All wait for pages on their way.
            self._memory.finish(self.running[0])
            return self.next_pass()
        return found

    def siblings(self, one: Running) -> list[Running]:
        """Other requests for answers to the prompt of a request that computes its tail, which have none of it: those
        that run, and those that wait next."""
        if self.tails.key_at(one, one.tail_start) is None:
            return []
        found = [
            other
            for other in self.running
            if other is not one
            and other.tail == one.tail
            and other.cached <= one.tail_start
            and not other.answer.tokens
        ]
        for number, request in self.waiting:
            if request.ids != one.request.ids:
                break
            found.append(Running.of(number, request, self.page, reuse=False))
        return found

    def passed(self, chosen: Sequence[tuple[Running, Segment]]) -> None:
        """The pass is over: its tokens are cached."""
        for one, segment in chosen:
            key = self._key(one)
            if key is not None:
                self.pool.register(key, one.pages[(one.cached - one.base) // self.page])
            one.cached = segment.end

    def end(self, one: Running) -> None:
        """Take a request off the batch and free its pages."""
        self.tails.begun(one)
        self.running.remove(one)
        self.pool.release(one.pages)
        if self._memory is not None:
            self._memory.release(one)

    def cancel(self, numbers: Collection[int]) -> None:
        """Give up some requests and their pages, between passes."""
        if self._preemption is not None:
            self._preemption.cancel(numbers)
        for one in [one for one in self.running if one.number in numbers]:
            self.end(one)
        if self._first is not None and self._first.number in numbers:
            self._first = None
        self.waiting = deque(entry for entry in self.waiting if entry[0] not in numbers)

    def stop(self) -> None:
        """Give up all requests and their pages."""
        self.cancel({number for number, _ in self.waiting} | {one.number for one in self.started})
        self.tails.close()

    def _compose(self) -> list[tuple[Running, Segment]]:
        chosen = _Chosen(self)
        for one in sorted(self.running, key=lambda one: not one.prefilled):
            key = self._key(one) or self.tails.key(one)
            if key not in chosen.keys and not self._comes(one):
                chosen.add(one, one.cached, one.step, key)
        # Over a copy: the first piece of each.
        for one, segment in list(chosen.found):
            self._add_pieces(chosen, one, segment.end)
        return chosen.found

    def _add_pieces(self, chosen: _Chosen, one: Running, first: int) -> None:
        """Further pieces of a prompt, from token `first` on, while there are rows for them. Not of a streamed request,
        whose context would be read for each."""
        while first < len(one.request.ids) and not one.older and len(chosen.found) < self.segments:
            place = (first - one.base) // self.page
            key = one.key(place) or self.tails.key_at(one, first)
            in_tiers = self._memory is not None and key is not None and self._memory.holds(key)
            there = in_tiers or (key is not None and self.pool.holds(key))
            if key in chosen.keys or there or place >= len(one.pages):
                return
            count = min(self.page, len(one.request.ids) - first)
            if not chosen.add(one, first, count, key):
                return
            first += count

    def _start(self, one: Running) -> bool:
        """Give a request its first pages; False, and nothing is changed, where there are too few."""
        self._share(one)
        if not self._comes(one) and self.tails.take(one):
            self.shared += one.cached - one.tail_start
        wanted = one.longest if self._preemption is None else self._preemption.first(one)
        if len(one.pages) < wanted:
            pages = self.pool.allocate(wanted - len(one.pages))
            if pages is None:
                self.pool.release(one.pages)
                self.shared -= one.cached
                one.pages, one.cached = [], 0
                return False
            one.pages += pages
        one.lay()
        return True

    def _key(self, one: Running) -> bytes | None:
        """The key of the page that a request computes next; None for one that its prompt does not fill."""
        return one.key((one.cached - one.base) // self.page)

    def _comes(self, one: Running) -> bool:
        """Whether a request waits for pages that are on their way."""
        return self._memory is not None and (one.arriving > 0 or self._memory.coming(self._key(one)))

    def _share(self, one: Running) -> None:
        """Take pages of the prompt that are there instead of the request's own."""
        if self._comes(one):
            return
        before = one.cached
        while (key := self._key(one)) is not None:
            place = (one.cached - one.base) // self.page
            page = self.pool.share(key)
            if page is not None:
                self.pool.release(one.pages[place : place + 1])
                one.pages[place : place + 1] = [page]
                self.shared += self.page
            elif self._memory is None or self._memory.coming(key) or not self._memory.fetch(one, place):
                break
            one.cached += self.page
        if one.cached > before:
            one.lay()

    def _take_tail(self, one: Running) -> None:
        """Give a request the tail of its prompt and its first token, where another one has computed them."""
        first = self.tails.first(one)
        if first is None or self._comes(one):
            return
        if self.tails.take(one):
            self.shared += one.cached - one.tail_start
            one.lay()
        if one.cached == len(one.tokens):
            self.tails.begun(one)
            if self.begin(one, first):
                self.ended.append(one)


class _Chosen:
    """The segments of a pass under composition."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._segments: list[Segment] = []
        self.found: list[tuple[Running, Segment]] = []
        self.keys: set[bytes | None] = set()
        """Of the pages of prompts that the pass fills."""

    def add(self, one: Running, first: int, count: int, key: bytes | None) -> bool:
        """Add `count` tokens of a request from token `first` on; whether there were rows for them."""
        start = self._segments[-1].rows.stop if self._segments else 0
        segment = Segment(start, count, first, one.runs, one.base, tuple(one.older))
        self._segments.append(segment)
        if self._scheduler.row_length(self._segments) > self._scheduler.rows:
            self._segments.pop()
            return False
        if key is not None:
            self.keys.add(key)
        self.found.append((one, segment))
        return True


def _row_length(segments: Sequence[Segment]) -> int:
    """In one row."""
    return pass_rows(segments[-1].start + segments[-1].count, WIDE)


def pages_for(requests: Sequence[Request], batch: int, page: int) -> int:
    """Pages that let the `batch` longest of the requests run at once."""
    return sum(sorted((one.pages(page) for one in requests), reverse=True)[:batch])


# Preemption by swapping: requests give up their device pages when others need them, and come back, the oldest first.
#
# A request gets pages as it grows. Where none is free,
#
# 1. a streamed request (one that is longer than the device's memory) moves its oldest pages to a tier;
# 2. else the youngest of the running requests, if it is younger than the one that needs the page, is swapped out;
# 3. else the request itself is swapped out.
#
# Where no tier has room, the request is computed again later: its prompt in the same pieces, and its answer token by
# token, so that bits are the same. Nothing is taken from the oldest request, and it may take from all others: it ends,
# and so does the next one. No request starts while another is swapped out.


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
