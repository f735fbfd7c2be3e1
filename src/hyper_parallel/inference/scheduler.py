"""Continuous batching (Yu et al. 2022, Orca): which requests' tokens are in the next pass.

Requests are admitted in the order in which they came, when a place in the batch and all the pages that the request can
ever need are free; so nothing that runs is preempted, and no request starves. Prompts are read in pieces on a grid from
position 0, which does not depend on what else runs: the same products in the same order in any company. A piece that
another request has computed is shared (`page_pool`); one that another request computes in this pass is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hyper_parallel.inference.page_allocator import Run
from hyper_parallel.inference.page_pool import PagePool, keys_of, runs_of
from hyper_parallel.inference.ragged_pass import Segment, padded
from hyper_parallel.inference.request import Completion, Request


@dataclass(eq=False)
class Running:
    """A request under way: its tokens, prompt first, of which `cached` have keys and values in its pages."""

    number: int
    request: Request
    pages: list[int]
    tokens: list[int]
    keys: list[bytes]
    """Of the pages that the prompt fills."""
    runs: tuple[Run, ...]
    answer: Completion = field(default_factory=Completion)
    cached: int = 0

    @property
    def prefilled(self) -> bool:
        """Whether only the newest token is missing in the cache."""
        return self.cached >= len(self.request.ids)


class Scheduler:
    """Requests that wait and that run."""

    def __init__(self, batch: int, rows: int, page: int, pool: PagePool) -> None:
        self.batch, self.rows, self.page, self.pool = batch, rows, page, pool
        self.shared = 0
        """Tokens of prompts whose pages were there."""
        self.waiting: deque[tuple[int, Request]] = deque()
        self.running: list[Running] = []

    def pages_of(self, request: Request) -> int:
        """Pages that a request can need: of its prompt and its longest answer but the last token, which is not read."""
        return -(-(len(request.ids) + request.sampling.max_tokens - 1) // self.page)

    def admit(self) -> None:
        """Start waiting requests while there is a place and memory for the first of them."""
        while self.waiting and len(self.running) < self.batch:
            number, request = self.waiting[0]
            pages = self.pool.allocate(self.pages_of(request))
            if pages is None:
                return
            self.waiting.popleft()
            keys = keys_of(request.ids, self.page) if self.pool.reuse else []
            self.running.append(Running(number, request, pages, list(request.ids), keys, runs_of(pages)))

    def next_pass(self) -> list[tuple[Running, Segment]]:
        """What the next pass computes: the newest token of requests that generate, then pieces of prompts, the oldest
        request first. Empty when nothing runs."""
        self.admit()
        found: list[tuple[Running, Segment]] = []
        computed: set[bytes] = set()
        start = 0
        for one in sorted(self.running, key=lambda one: not one.prefilled):
            self._share(one)
            count = 1 if one.prefilled else min(self.page, len(one.request.ids) - one.cached)
            key = self._key(one)
            if padded(start + count) > self.rows or key in computed:
                continue
            if key is not None:
                computed.add(key)
            found.append((one, Segment(start, count, one.cached, one.runs)))
            start += count
        return found

    def passed(self, chosen: Sequence[tuple[Running, Segment]]) -> None:
        """The pass is over: its tokens are cached."""
        for one, segment in chosen:
            key = self._key(one)
            if key is not None:
                self.pool.register(key, one.pages[one.cached // self.page])
            one.cached = segment.end

    def end(self, one: Running) -> None:
        """Take a request off the batch and free its pages."""
        self.running.remove(one)
        self.pool.release(one.pages)

    def _key(self, one: Running) -> bytes | None:
        """Of the page that a request computes next; None for one that its prompt does not fill."""
        place = one.cached // self.page
        return one.keys[place] if place < len(one.keys) else None

    def _share(self, one: Running) -> None:
        """Take pages of the prompt that are there instead of the request's own."""
        before = one.cached
        while (key := self._key(one)) is not None and (page := self.pool.share(key)) is not None:
            place = one.cached // self.page
            self.pool.release([one.pages[place]])
            one.pages[place] = page
            one.cached += self.page
        if one.cached > before:
            self.shared += one.cached - before
            one.runs = runs_of(one.pages)


def pages_for(requests: Sequence[Request], batch: int, page: int) -> int:
    """Pages that let the `batch` longest of the requests run at once."""
    needs = sorted(
        (-(-(len(one.ids) + one.sampling.max_tokens - 1) // page) for one in requests), reverse=True
    )
    return sum(needs[:batch])
