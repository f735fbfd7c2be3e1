"""A request under way: its tokens, and where their keys and values lie.

tokens   0 ........ base ....................... cached ... len(tokens)
         `older`    `pages`, on the device       not yet computed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hyper_parallel.inference.kv_cache.page_allocator import Run
from hyper_parallel.inference.kv_cache.page_pool import keys_of, runs_of, tail_key
from hyper_parallel.inference.kv_cache.stream import Group
from hyper_parallel.inference.kv_cache.tiers import Block
from hyper_parallel.inference.request import Completion, Request


@dataclass(eq=False)
class StoredPages:
    """Pages of a request that lie in one block of `count` pages: page `index` is the request's page `place`, counted
    from `base`."""

    block: Block
    count: int
    places: list[tuple[int, int]]


@dataclass(eq=False)
class Running:
    """A request under way, prompt first, of which `cached` tokens have keys and values."""

    number: int
    request: Request
    page: int
    tokens: list[int]
    keys: list[bytes]
    """Of the pages that the prompt fills."""
    tail: bytes | None = None
    """Of the prompt's last page, which it does not fill (`prompt_tails`)."""
    pages: list[int] = field(default_factory=list)
    """On the device, of the tokens from `base` on. Those behind `cached` are reserved."""
    runs: tuple[Run, ...] = ()
    """The same; `lay` renews them."""
    answer: Completion = field(default_factory=Completion)
    cached: int = 0
    base: int = 0
    older: list[Group] = field(default_factory=list)
    """The tokens before `base`, in tiers, layer by layer."""
    stored: list[StoredPages] = field(default_factory=list)
    """Pages in tiers while the request is swapped out."""
    arriving: int = 0
    """Pages on their way to the device; until they are there, the request is in no pass."""

    @classmethod
    def of(cls, number: int, request: Request, page: int, reuse: bool) -> Running:
        """A request that has not begun."""
        keys = keys_of(request.ids, page) if reuse else []
        tail = tail_key(request.ids[len(keys) * page :], keys) if reuse else None
        answer = Completion(tokens=list(request.ids[len(request.ids) - request.answered :]))
        return cls(number, request, page, list(request.ids), keys, tail, answer=answer)

    @property
    def prefilled(self) -> bool:
        """Whether only tokens of the answer are missing in the cache, which are computed one by one."""
        return self.cached >= len(self.request.ids)

    @property
    def step(self) -> int:
        """Tokens that the next pass computes: one, or a piece of the prompt on the grid of pages."""
        return 1 if self.prefilled else min(self.page, len(self.request.ids) - self.cached)

    @property
    def tail_start(self) -> int:
        """Tokens of the prompt before its last page."""
        return (len(self.request.ids) - 1) // self.page * self.page

    @property
    def tail_place(self) -> int:
        """The place of that page, counted from `base`."""
        return (self.tail_start - self.base) // self.page

    @property
    def longest(self) -> int:
        """Pages that it can need."""
        return self.request.pages(self.page)

    @property
    def used(self) -> int:
        """Pages from `base` on that have tokens."""
        return -(-(self.cached - self.base) // self.page)

    def key(self, place: int) -> bytes | None:
        """Of page `place`, counted from `base`; None where the prompt does not fill it."""
        place += self.base // self.page
        return self.keys[place] if place < len(self.keys) else None

    def lay(self) -> None:
        """After a change of pages."""
        self.runs = runs_of(self.pages)
