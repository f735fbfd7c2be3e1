"""Pages with reference counts, and reuse of prompts' pages by the hash of everything before them.

A page of a prompt is known by a digest of all tokens from position 0 to its end: keys and values depend on nothing
else, since prompts are read in pieces on the grid of pages. Requests with a common beginning share its pages. A page
that no request uses is kept until its memory is needed; the one that was used least recently goes first, of a prompt
the last one. Pages whose keys are pinned stay, once they are there. Pages with tokens of an answer are not shared:
these were computed one by one, which rounds otherwise.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence

from hyper_parallel.inference.run_allocator import Run, RunAllocator


class PagePool:
    """All pages of a cache. `reuse`: keep pages of prompts for requests to come."""

    def __init__(self, pages: int, reuse: bool = True) -> None:
        self.pages, self.reuse = pages, reuse
        self._allocator = RunAllocator(pages)
        self._users: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._copied: set[bytes] = set()
        """Keys of pages that are filled in part."""
        self._pins: dict[bytes, int | None] = {}
        """Keys that are pinned, with their pages that are there."""
        self._idle: dict[int, None] = {}
        """Pages without users that are kept, the least recently used first."""
        self.evicted: Callable[[list[tuple[bytes, int]]], None] = lambda pages: None
        """Called with keys and pages that are about to be given up, `block` at a time."""
        self.block = 1

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return self._allocator.free + len(self._idle)

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Pages for one user, in one run where there is one, behind page `after` where that is free; None where fewer
        are available."""
        if count > self.available:
            return None
        while self._allocator.free < count:
            self._evict(max(self.block, count - self._allocator.free))
        runs = self._allocator.allocate(count, after)
        assert runs is not None
        pages = [page for run in runs for page in range(run.first, run.end)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def forget(self) -> None:
        """Give up all pages without users, pinned ones too, and what is known of the others."""
        for key in self._pins:
            self._release_pin(key)
        for page in self._idle:
            self._allocator.release((Run(page, 1),))
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        self._copied.clear()

    def _evict(self, count: int) -> None:
        pages = list(self._idle)[:count]
        known = [(self._key_of[page], page) for page in pages]
        self.evicted([(key, page) for key, page in known if key not in self._copied])
        for key, page in known:
            self._forget(key)
            del self._idle[page]
        self._allocator.release(tuple(Run(page, 1) for page in pages))

    def _forget(self, key: bytes) -> int:
        page = self._page_of.pop(key)
        del self._key_of[page]
        self._copied.discard(key)
        return page

    def holds(self, key: bytes) -> bool:
        """Whether there is a page with this key."""
        return key in self._page_of

    def share(self, key: bytes) -> int | None:
        """The page with this key, with one more user; None if there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._users[page] = self._users.get(page, 0) + 1
            self._idle.pop(page, None)
        return page

    def users(self, page: int) -> int:
        """Requests that use a page."""
        return self._users.get(page, 0)

    def register(self, key: bytes, page: int, *, copied: bool = False) -> None:
        """The page holds what the key says. `copied`: in its first rows; its user writes to the others, and whoever
        shares it takes a copy."""
        if self.reuse and key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key
            if copied:
                self._copied.add(key)
            self._take_pin(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Pages with these keys have one more user, from now on or from when they are there."""
        for key in keys:
            self._pins.setdefault(key, None)
            self._take_pin(key)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Pages with these keys are as others again."""
        for key in keys:
            self._release_pin(key)
            self._pins.pop(key, None)

    @property
    def pinned(self) -> int:
        """Pages that are there and pinned."""
        return sum(page is not None for page in self._pins.values())

    def _take_pin(self, key: bytes) -> None:
        if key in self._pins and self._pins[key] is None:
            self._pins[key] = self.share(key)

    def _release_pin(self, key: bytes) -> None:
        page = self._pins.get(key)
        if page is not None:
            self._pins[key] = None
            self.release([page])

    def drop(self, key: bytes) -> None:
        """Nobody needs the page with this key any more, but for its users."""
        if key in self._page_of and (page := self._forget(key)) in self._idle:
            del self._idle[page]
            self._allocator.release((Run(page, 1),))

    def release(self, pages: Sequence[int]) -> None:
        """One user less of each."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._allocator.release((Run(page, 1),))


def keys_of(tokens: Sequence[int], page: int) -> list[bytes]:
    """Digests of the pages that a prompt fills. The last token is always computed, since its logits are needed."""
    keys, key = list[bytes](), b""
    for first in range(0, (len(tokens) - 1) // page * page, page):
        key = _digest(key, tokens[first : first + page])
        keys.append(key)
    return keys


def filled_keys(tokens: Sequence[int], page: int) -> list[bytes]:
    """Digests of all pages that these tokens fill, as a prompt has them that goes on."""
    return keys_of([*tokens, 0], page)


def tail_key(tokens: Sequence[int], keys: Sequence[bytes]) -> bytes:
    """Digest of a whole prompt that fills the pages `keys` and a part of another one, or all of it."""
    return _digest(b"tail" + b"".join(keys[-1:]), tokens)


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()
