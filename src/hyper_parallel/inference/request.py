"""Requests of the engine: the token ids of a prompt, the tokens and pages of a request under way, and the text of its
answer.

    tokens   0 ........ base ....................... cached ... len(tokens)
             `older`    `pages`, on the device       not yet computed
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hyper_parallel.config.inference import Sampling
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.chat import prompt as rendered
from hyper_parallel.data.document import Chat
from hyper_parallel.errors import DataError
from hyper_parallel.inference.kv_cache.page_pool import PagePool, keys_of, tail_key
from hyper_parallel.inference.kv_cache.tiers import Block, Group
from hyper_parallel.inference.run_allocator import Run, runs_of

Finish = Literal["stop", "length"]
"""Why an answer ended: a stop token or string, or `max_tokens`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, as token ids, with how its answer is drawn: token i is a function of (seed, row, sample, i). `row`
    stands for the prompt: a digest of its ids (`row_of`), or a number that the caller gives it; `sample` numbers the
    answers to one."""

    ids: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    row: int = 0
    sample: int = 0
    answered: int = 0
    """The last of `ids` that are its answer's first tokens already, behind which it goes on."""

    def pages(self, page: int) -> int:
        """Pages of its prompt and its longest answer but the last token, which is not read."""
        return -(-(len(self.ids) - self.answered + self.sampling.max_tokens - 1) // page)


def row_of(ids: Sequence[int]) -> int:
    """A prompt's `row` where its answers are to be a function of the prompt, wherever it stands among others."""
    return int.from_bytes(hashlib.blake2b(array("q", ids).tobytes(), digest_size=7).digest())


@dataclass(kw_only=True)
class Completion:
    """An answer: its token ids, its text, and the natural logarithm of each token's probability under the model (before
    temperature and filters; or as `Sampling.logprobs` says), where asked for."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish = "length"
    logprobs: list[float] | None = None


# A request under way: its tokens, and where their keys and values lie.
#
# tokens   0 ........ base ....................... cached ... len(tokens)
#          `older`    `pages`, on the device       not yet computed


@dataclass(eq=False)
class StoredPages:
    """Pages of a request that lie in one block of `count` pages: page `index` is the request's page `place`, counted
    from `base`."""

    block: Block
    count: int
    places: list[tuple[int, int]]


@dataclass(eq=False)
class Running:
    """A request under way: its tokens, prompt first; `cached` of them have keys and values."""

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
        """The key of page `place`, counted from `base`; None where the prompt does not fill it."""
        place += self.base // self.page
        return self.keys[place] if place < len(self.keys) else None

    def lay(self) -> None:
        """After a change of pages."""
        self.runs = runs_of(self.pages)


# The text of an answer, and where a stop string ends it.
#
# Stop strings are looked for in the text in which special tokens have their names, as Transformers' `stop_strings` do:
# `<|im_end|>` is found, and no string is found across a special token that does not name it. Special tokens are no part
# of an answer's text.


class TextOf(Protocol):
    """Gives the text of tokens: without special tokens, or with their names (`special`)."""

    def __call__(self, ids: list[int], /, special: bool = False) -> str: ...


def no_text(ids: list[int], /, special: bool = False) -> str:
    """The empty text, for answers whose tokens alone are needed."""
    return ""


def before_stop(tokens: list[int], stops: Sequence[str], text_of: TextOf) -> str | None:
    """The text of an answer before the first stop string, if its last token completes one."""
    # A character has at most 4 bytes, and a token at least one.
    window = 4 * max(map(len, stops)) + 8
    recent = text_of(tokens[-window:], special=True)
    if not any(stop in recent for stop in stops):
        return None
    whole = text_of(tokens, special=True)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    if not places:
        return None
    end = min(places)
    for count in reversed(range(len(tokens))):
        named = text_of(tokens[:count], special=True)
        if len(named) <= end and whole.startswith(named):
            shown = text_of(tokens[:count])
            # The string begins inside of the next token; a special one shows nothing.
            is_special = text_of(tokens[: count + 1]) == shown
            return shown if is_special else shown + whole[len(named) : end]
    return whole[:end]


NO_TOKENS = "the prompt has no tokens; generation needs at least one to go on from"


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    *,
    special_tokens: bool = True,
) -> list[int]:
    """The ids of a text, or of the messages of a conversation up to the answer; a last message of the assistant is the
    answer's beginning. `options`: what the template gets beside the messages (`tools`, `documents` and others).
    `special_tokens`: whether names of special tokens in a text are these tokens.

    Raises DataError for a prompt without tokens, and for messages or options that the template does not take.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise DataError("the prompt is empty; generation needs at least one token to go on from")
        if not is_text(prompt):
            raise DataError("the prompt is no text: it has half of a character (a lone surrogate)")
        ids = tokenizer.encode(prompt, special_tokens=special_tokens)
    else:
        chat = Chat("messages", [dict(message) for message in prompt], options=dict(options or {}))
        ids = tokenizer.encode_template([rendered(tokenizer.transformers, chat)])[0][0]
    if not ids:
        raise DataError(NO_TOKENS)
    return ids


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8, which lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Prompt tails: the last page of a prompt, which it fills in part, is computed once for the n answers to the prompt.
#
# Each answer writes to that page, so it is copied on write. One request computes it; from its logits the first token of
# every other answer to the prompt is chosen at once, also of those that wait, since a token is a function of logits,
# seed, row and answer. Then the page is known by a key, as those that prompts fill are (`page_pool`), and each of the
# others copies it into its own page, or takes it over where nobody uses it any more. Rows behind the prompt's may
# have been written by another answer: they are written again before they are read.
#
# A page that is gone, since its memory was needed, is computed again, in the same piece of the prompt and with the same
# bits.

First = tuple[int, float | None]
"""The first token of an answer, and the natural logarithm of its probability where it is wanted."""


class PromptTails:
    """Tails of the prompts of one run. Without `copy`, each answer's page is computed."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.copy: Callable[[int, int], None] | None = None
        """Copies a page to another one, in all layers."""
        self._first: dict[bytes, dict[int, First]] = {}
        """By key, of the requests that have not taken the page yet."""

    def key(self, one: Running) -> bytes | None:
        """The key of the page that a request computes next, if it is the tail of a prompt that other requests may
        have."""
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
