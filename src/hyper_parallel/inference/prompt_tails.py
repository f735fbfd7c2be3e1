"""Prompt tails: the last page of a prompt, which it fills in part, is computed once for the n answers to the prompt.

Each answer writes to that page, so it is copied on write. One request computes it; from its logits the first token of
every other answer to the prompt is chosen at once, also of those that wait, since a token is a function of logits,
seed, row and answer. Then the page is known by a key, as those that prompts fill are (`page_pool`), and each of the
others copies it into a page of its own, or takes it over where nobody uses it any more. Rows behind the prompt's may
have been written by another answer: they are written again before they are read.

A page that is gone, since its memory was needed, is computed again, in the same piece of the prompt and with the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hyper_parallel.inference.kv_cache.page_pool import PagePool
from hyper_parallel.inference.running import Running

First = tuple[int, float | None]
"""The first token of an answer, and the natural logarithm of its probability where it is wanted."""


class PromptTails:
    """Of one run. Without `copy`, each answer's page is computed."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.copy: Callable[[int, int], None] | None = None
        """Copies a page to another one, in all layers."""
        self._first: dict[bytes, dict[int, First]] = {}
        """By key, of the requests that have not taken the page yet."""

    def key(self, one: Running) -> bytes | None:
        """Of the page that a request computes next, if it is the tail of a prompt that other requests may have."""
        return self.key_at(one, one.cached)

    def key_at(self, one: Running, first: int) -> bytes | None:
        """The same, if it has computed `first` tokens."""
        at_tail = first == one.tail_start and not one.answer.tokens
        return one.tail if at_tail and self.copy is not None and self._pool.reuse else None

    def open(self, one: Running, first: Mapping[int, First]) -> None:
        """A request has computed the tail of its prompt, and these are the first tokens of other answers to it."""
        if first and one.tail is not None:
            self._pool.register(one.tail, one.pages[one.tail_place], copied=True)
            self._first[one.tail] = {**self._first.get(one.tail, {}), **first}

    def first(self, one: Running) -> First | None:
        """The first token of a request that another one's pass has chosen."""
        return self._first.get(one.tail, {}).get(one.number) if one.tail is not None else None

    def take(self, one: Running) -> bool:
        """Give a request that has come to its tail the page, whose tokens are cached then; False where it is gone or
        there is no page for a copy."""
        key = self.key(one)
        if key is None or self.first(one) is None or (page := self._pool.share(key)) is None:
            return False
        assert self.copy is not None
        place = one.tail_place
        if self._pool.users(page) == 1:
            self._pool.release(one.pages[place : place + 1])
            one.pages[place : place + 1] = [page]
        else:
            if place < len(one.pages):
                self.copy(page, one.pages[place])
            self._pool.release([page])
            if place >= len(one.pages):
                return False
        one.cached = len(one.request.ids)
        return True

    def begun(self, one: Running) -> None:
        """A request has its first token; the page is given up with the last one that needs it."""
        others = self._first.get(one.tail, {}) if one.tail is not None else {}
        if others.pop(one.number, None) is not None and not others and one.tail is not None:
            del self._first[one.tail]
            self._pool.drop(one.tail)

    def close(self) -> None:
        """Give up all pages."""
        for key in self._first:
            self._pool.drop(key)
        self._first.clear()
