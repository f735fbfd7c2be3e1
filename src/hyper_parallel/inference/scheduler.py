"""Continuous batching (Yu et al. 2022, Orca): which requests' tokens are in the next pass.

Requests are admitted in the order in which they came, when a place in the batch and all the pages that the request can
ever need are free; so nothing that runs is preempted, and no request starves. Prompts are read in pieces on a grid from
position 0, which does not depend on what else runs: the same products in the same order in any company.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hyper_parallel.inference.page_allocator import PageAllocator, Run
from hyper_parallel.inference.ragged_pass import Segment, padded
from hyper_parallel.inference.request import Answer, Request


@dataclass(eq=False)
class Running:
    """A request under way: its tokens, prompt first, of which `cached` have keys and values in its pages."""

    number: int
    request: Request
    runs: tuple[Run, ...]
    tokens: list[int]
    answer: Answer = field(default_factory=Answer)
    cached: int = 0

    @property
    def prefilled(self) -> bool:
        """Whether only the newest token is missing in the cache."""
        return self.cached >= len(self.request.ids)


class Scheduler:
    """Requests that wait and that run."""

    def __init__(self, batch: int, rows: int, page: int, pages: int) -> None:
        self.batch, self.rows, self.page = batch, rows, page
        self.allocator = PageAllocator(pages)
        self.waiting: deque[tuple[int, Request]] = deque()
        self.running: list[Running] = []

    def pages_of(self, request: Request) -> int:
        """Pages that a request can need: of its prompt and its longest answer but the last token, which is not read."""
        return -(-(len(request.ids) + request.sampling.max_tokens - 1) // self.page)

    def admit(self) -> None:
        """Start waiting requests while there is a place and memory for the first of them."""
        while self.waiting and len(self.running) < self.batch:
            number, request = self.waiting[0]
            runs = self.allocator.allocate(self.pages_of(request))
            if runs is None:
                return
            self.waiting.popleft()
            self.running.append(Running(number, request, runs, list(request.ids)))

    def next_pass(self) -> list[tuple[Running, Segment]]:
        """What the next pass computes: the newest token of requests that generate, then pieces of prompts, the oldest
        request first. Empty when nothing runs."""
        self.admit()
        found: list[tuple[Running, Segment]] = []
        start = 0
        for one in sorted(self.running, key=lambda one: not one.prefilled):
            count = 1 if one.prefilled else min(self.page, len(one.request.ids) - one.cached)
            if padded(start + count) > self.rows:
                continue
            found.append((one, Segment(start, count, one.cached, one.runs)))
            start += count
        return found

    def end(self, one: Running) -> None:
        """Take a request off the batch and free its pages."""
        self.running.remove(one)
        self.allocator.release(one.runs)


def pages_for(requests: Sequence[Request], batch: int, page: int) -> int:
    """Pages that let the `batch` longest of the requests run at once."""
    needs = sorted(
        (-(-(len(one.ids) + one.sampling.max_tokens - 1) // page) for one in requests), reverse=True
    )
    return sum(needs[:batch])
