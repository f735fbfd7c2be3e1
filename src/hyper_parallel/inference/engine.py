"""The engine: passes of a ragged batch through the model until every request has its answer.

A pass computes the rows that the scheduler chose; a request whose newest token was among them gets the next one. Keys
and values go to pages through `PagedCache`, attention is `paged_attention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.config.inference import Inference, Sampling
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.inference import paged_attention
from hyper_parallel.inference.blocked_products import (
    PADDED,
    blocked_products,
    experts_by,
    register_padded_experts,
)
from hyper_parallel.inference.kv_cache.engine_cache import RunCache
from hyper_parallel.inference.kv_cache.page_pool import PagePool
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from hyper_parallel.inference.paged_attention import ExpandsKeys
from hyper_parallel.inference.ragged_pass import (
    BLOCK,
    GRANULE,
    WIDE,
    RaggedPass,
    Segment,
    pass_rows,
    positions_of,
)
from hyper_parallel.inference.request import Completion, Request, Running, TextOf, before_stop, no_text
from hyper_parallel.inference.run_allocator import rows_of
from hyper_parallel.inference.sampler import Decide, decide
from hyper_parallel.inference.scheduler import Scheduler, pages_for
from hyper_parallel.shard.forward import inference, parameters_of
from hyper_parallel.shard.sharded_model import is_sharded

Fit = Callable[["Engine", Sequence[Request], Inference], Inference]
"""Settings that fit into memory, for some requests."""
Advance = Callable[[list[tuple[Running, Segment]]], object]


class Engine:
    """Runs requests on one model. Not for several threads at once."""

    def __init__(
        self,
        model: nn.Module,
        page: int,
        *,
        layers: int,
        eos: frozenset[int],
        int8: bool = False,
        stored: int | None = None,
    ) -> None:
        """`page`: tokens of a page. `layers`: those with a cache. `eos`: tokens that end an answer, which they are no
        part of. `int8`: pages of rounded keys and values. `stored`: tokens of a page that this process stores, by
        default all."""
        self.attention = paged_attention.NAME
        paged_attention.register(self.attention, paged_attention.attention, paged_attention.ragged_mask)
        """The name of the attention function."""
        self.model: Any = model
        self.page = page
        self.layers = layers
        self.eos = eos
        self.device = next(model.parameters()).device
        self.granule = GRANULE if self.device.type == "cpu" and not is_sharded(model) else WIDE
        """Rows of a pass are a multiple of this many."""
        self.decide: Decide = decide
        """Chooses tokens. Several ranks that compute the same passes choose together."""
        self.around_pass: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context for each pass of `run`."""
        self.taken: Callable[[Running, int, float | None], object] = lambda one, token, logprob: None
        """Called with each token that a request gets, the one that ends it included, with its log-probability."""
        self.fit: Fit | None = None
        """Chooses `batch` and `pages` of a run, and places weights for it."""
        self.row_length: Callable[[Sequence[Segment]], int] = self._row_length
        """Rows of a pass over segments."""
        self.passes = 0
        self.cache = RunCache(model, layers, page, stored, int8=int8)
        self._keeps = "logits_to_keep" in parameters_of(type(model).forward)

    def run(
        self, requests: Sequence[Request], settings: Inference, text_of: TextOf
    ) -> Iterator[tuple[int, Completion]]:
        """Each request's place and completion, as it ends. Between them the model is as it was.

        Raises UnsupportedModelError for a model whose attention is not known, DataError for a request that needs more
        memory than there is.
        """
        with self.open_run(requests, settings, text_of) as run:
            for number, request in enumerate(requests):
                run.submit(number, request)
            while ended := run.advance():
                yield from ended
            assert not len(run), "a request that was never admitted, or that no pass has room for"

    @contextmanager
    def open_run(self, like: Sequence[Request], settings: Inference, text_of: TextOf) -> Iterator[OpenRun]:
        """A run whose requests come one by one. `like`: as long as the longest that run at once, for which memory is
        taken. Raises as `run`."""
        if self.fit is not None:
            settings = self.fit(self, like, settings)
        with self.cache.run(like, settings) as (cache, scheduler):
            scheduler.waiting.clear()
            scheduler.row_length = self.row_length
            scheduler.begin = lambda one, first: self._took(one, *first, text_of)
            yield OpenRun(scheduler, lambda passes: self._passes(scheduler, cache, text_of, passes))

    def replayed(self, texts: Sequence[list[int]], answer: int, *, exact: bool = True) -> list[Tensor]:
        """Float32 logits [answer + 1, V] behind each of the last tokens of each text, as generation computes them: all
        but the last `answer` tokens are a prompt, and these an answer. `exact`: with pages in the dtype of the model,
        also where runs have int8 pages."""
        sampling = Sampling(max_tokens=answer + 1)
        requests = [Request(ids=tuple(text[:-answer]), sampling=sampling) for text in texts]
        pages = pages_for(requests, len(texts), self.page)
        scheduler = Scheduler(len(texts), 2 * self.page, self.page, PagePool(pages, reuse=False))
        scheduler.row_length = self.row_length
        scheduler.waiting.extend(enumerate(requests))
        found: list[list[Tensor]] = [[] for _ in texts]
        cache = self.cache.fresh(KVCacheSizes(device=pages), exact=exact)
        with self._generating(cache):
            while chosen := scheduler.next_pass():
                ready, logits = self._passed(chosen, cache)
                scheduler.passed(chosen)
                for one, row in zip(ready, logits, strict=True):
                    found[one.number].append(row)
                    if len(one.tokens) == len(texts[one.number]):
                        scheduler.end(one)
                    else:
                        one.tokens.append(texts[one.number][len(one.tokens)])
        return [torch.stack(rows) for rows in found]

    def _row_length(self, segments: Sequence[Segment]) -> int:
        return pass_rows(segments[-1].start + segments[-1].count, self.granule)

    @contextmanager
    def rehearsal(self, sizes: KVCacheSizes) -> Iterator[tuple[PagedCache, Advance]]:
        """A cache of zeros, and a function that runs passes of made-up requests with it."""
        cache = self.cache.zeros(sizes)
        with self._generating(cache):
            yield cache, lambda chosen: self._advance(chosen, cache, no_text)

    @contextmanager
    def _generating(self, cache: PagedCache) -> Iterator[None]:
        """Inside, the model's attention is `paged_attention`, without gradients; afterwards it is as it was."""
        given = self.model.config._attn_implementation
        padded = register_padded_experts()
        self.model.set_attn_implementation(self.attention)
        try:
            with (
                experts_by(self.model, PADDED) if padded else nullcontext(),
                inference(self.model),
                replace(current_step(), expert_rows=WIDE).installed(),
            ):
                yield
        finally:
            self.cache.learn(cache)
            self.model.set_attn_implementation(given)

    def _passes(
        self, scheduler: Scheduler, cache: PagedCache, text_of: TextOf, passes: int | None
    ) -> list[Running]:
        """As `OpenRun.advance`."""
        found: list[Running] = []
        with self._generating(cache):
            for _ in itertools.count() if passes is None else range(passes):
                computed, ended = self._one_pass(scheduler, cache, text_of)
                found += ended
                if not computed or (passes is None and found):
                    break
        return found

    def _one_pass(
        self, scheduler: Scheduler, cache: PagedCache, text_of: TextOf
    ) -> tuple[bool, list[Running]]:
        """Whether there was anything to compute, and the requests that ended."""
        chosen = scheduler.next_pass()
        ended, scheduler.ended = scheduler.ended, []
        if chosen:
            with self.around_pass():
                ended += self._advance(chosen, cache, text_of, scheduler)
            scheduler.passed(chosen)
        for one in ended:
            scheduler.end(one)
        return bool(chosen), ended

    def _advance(
        self,
        chosen: list[tuple[Running, Segment]],
        cache: PagedCache,
        text_of: TextOf,
        scheduler: Scheduler | None = None,
    ) -> list[Running]:
        """One pass; the requests that end with it."""
        ready, logits = self._passed(chosen, cache)
        if not ready:
            return []
        decided = self.decide(ready, logits)
        if scheduler is not None:
            for place, one in enumerate(ready):
                self._choose_for_siblings(one, logits[place], len(ready), scheduler)
        return [
            one
            for one, (token, logprob) in zip(ready, decided, strict=True)
            if self._took(one, token, logprob, text_of)
        ]

    def _choose_for_siblings(self, one: Running, logits: Tensor, most: int, scheduler: Scheduler) -> None:
        """Choose the first tokens of other answers to a prompt that ends in this pass, at most `most` at once: memory
        was measured for as many as are in the pass."""
        others = scheduler.siblings(one)
        first: dict[int, tuple[int, float | None]] = {}
        for begin in range(0, len(others), most):
            part = others[begin : begin + most]
            chosen = self.decide(part, logits.expand(len(part), -1))
            first |= {other.number: token for other, token in zip(part, chosen, strict=True)}
        scheduler.tails.open(one, first)

    def _passed(
        self, chosen: list[tuple[Running, Segment]], cache: PagedCache
    ) -> tuple[list[Running], Tensor]:
        """One pass: the requests whose next token it decides, and logits for it."""
        ready = [(one, segment) for one, segment in chosen if segment.end == len(one.tokens)]
        logits = self._logits(
            [one.tokens[segment.first : segment.end] for one, segment in chosen],
            [segment for _, segment in chosen],
            [segment for _, segment in ready],
            cache,
        )
        return [one for one, _ in ready], logits

    def _took(self, one: Running, token: int, logprob: float | None, text_of: TextOf) -> bool:
        """Add a token to an answer; whether the answer ends with it."""
        answer, sampling = one.answer, one.request.sampling
        self.taken(one, token, logprob)
        if token in self.eos:
            answer.finish = "stop"
            answer.text = text_of(answer.tokens)
            return True
        one.tokens.append(token)
        answer.tokens.append(token)
        if logprob is not None:
            answer.logprobs = [*(answer.logprobs or ()), logprob]
        if sampling.stop and (text := before_stop(answer.tokens, sampling.stop, text_of)) is not None:
            answer.text, answer.finish = text, "stop"
            return True
        if len(answer.tokens) == sampling.max_tokens:
            answer.text = text_of(answer.tokens)
            return True
        return False

    def _logits(
        self,
        tokens: Sequence[Sequence[int]],
        segments: Sequence[Segment],
        ready: Sequence[Segment],
        cache: PagedCache,
    ) -> Tensor:
        """Float32 logits [len(ready), V] of the last tokens of the segments `ready`, after a pass over all segments."""
        count = sum(len(part) for part in tokens)
        length = pass_rows(count, self.granule)
        row = [token for part in tokens for token in part] + [0] * (length - count)
        page = self.page
        slots = [
            slot
            for one in segments
            for rows in rows_of(one.runs, page, one.first - one.base, one.end - one.base)
            for slot in range(rows.start, rows.stop)
        ]
        ragged = RaggedPass(segments, page, torch.tensor(slots, device=self.device))
        last = [segment.start + segment.count - 1 for segment in ready]
        return self._forward(row, positions_of(segments, length, self.device), last, ragged, cache)

    def _forward(
        self,
        row: Sequence[int],
        positions: Tensor,
        last: Sequence[int],
        ragged: RaggedPass,
        cache: PagedCache,
    ) -> Tensor:
        """Float32 logits [len(last), V] of the rows `last`, after the pass over the tokens `row` at int64 `positions`
        [1, len(row)]."""
        rows_kept = [*last] + [0] * (pass_rows(len(last), self.granule) - len(last))
        kept = {"logits_to_keep": torch.tensor(rows_kept, dtype=torch.int64, device=self.device)}
        ids = torch.tensor([row], device=self.device)
        # A layer that turns out to compute with cached values is given what it needs for that, from the next try on;
        # if it is not linear in them, all of them.
        for _ in range(2 * self.layers + 1):
            try:
                # What a budget's plan has measured is the memory of blocks.
                ragged.length = len(row)
                with ragged, blocked_products(BLOCK, merged=self.cache.spare):
                    self.passes += 1
                    cache.begin(ragged)
                    out = self.model(
                        input_ids=ids,
                        position_ids=positions,
                        past_key_values=cache,
                        use_cache=True,
                        **(kept if self._keeps else {}),
                    )
                logits: Tensor = out.logits[0, : len(last)] if self._keeps else out.logits[0, list(last)]
                return logits.float()
            except ExpandsKeys:
                continue
        raise UnsupportedModelError("the model's attention does not read what its cache holds")


class OpenRun:
    """Made by `Engine.open_run`. Not for several threads at once."""

    def __init__(self, scheduler: Scheduler, advance: Callable[[int | None], list[Running]]) -> None:
        """`advance` computes as many passes as it is given, and gives the requests that ended."""
        self._scheduler, self._advance = scheduler, advance

    def __len__(self) -> int:
        """Requests without a whole answer."""
        return len(self._scheduler.waiting) + len(self._scheduler.started)

    def submit(self, number: int, request: Request) -> None:
        """Add a request, no longer than those for which memory was taken; `number` is its own in this run."""
        self._scheduler.waiting.append((number, request))

    def advance(self, passes: int | None = None) -> list[tuple[int, Completion]]:
        """Compute `passes` passes, fewer where no request is left, or, left out, until some request ends; the number
        and answer of each that ended."""
        return [(one.number, one.answer) for one in self._advance(passes)]

    def cancel(self, numbers: Collection[int]) -> None:
        """Give up some requests; the others go on."""
        self._scheduler.cancel(numbers)

    def withdraw(self) -> list[tuple[int, Request, list[int]]]:
        """Give up all unfinished requests, which ends the run: the number of each, its request and the tokens of its
        answer until now."""
        found = [(one.number, one.request, list(one.answer.tokens)) for one in self._scheduler.started]
        found += [
            (number, one, list(one.ids[len(one.ids) - one.answered :]))
            for number, one in self._scheduler.waiting
        ]
        self._scheduler.stop()
        return found
