"""Simulated run of a workload, pass by pass: the engine's own scheduler composes passes, the pricer says how long
each takes.

`inference.scheduler` admits requests and cuts prompts, and `inference.page_pool` shares pages of prompts, as they do
in a run; only tokens are made up. A pass takes what its closed form says, which is what the discrete-event engine
gives for its Trace. With contexts in a tier, a request's pages go there when it ends. When the next turn, or a
request with the same beginning, arrives, those that are not on the device are copied back while others run (a pending
lookup), and the request waits for them.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hyper_parallel.config.inference import GenerationWorkload, Inference, Sampling
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference.kv_cache.page_pool import PagePool, keys_of
from hyper_parallel.inference.request import Request, Running
from hyper_parallel.inference.scheduler import Scheduler
from hyper_parallel.simulator.generation.pass_cost import PassCost, PassPricer
from hyper_parallel.simulator.generation.pass_model import PassLoad, Piece
from hyper_parallel.units import format_count

MOST_TOKENS = 200_000_000
"""Prompt tokens that a simulated run may have: their digests are computed as in a run."""


@dataclass(frozen=True)
class SimulatedRun:
    """What a simulated run came to on one rank. Times are seconds, memory is bytes."""

    seconds: float
    passes: int
    tokens: int
    """Of answers."""
    first_token: float
    """Median of the time from a request's arrival to its first token."""
    first_token_p90: float
    between_tokens: float
    """Median of a request's seconds for each further token."""
    bound: float
    """Sum of the bounds of all passes."""
    limits: dict[str, float]
    """Seconds of passes by what decides their bound."""
    cached: int
    """Pages of the KV cache on the device, in tokens."""
    fetched: float
    """Bytes of idle contexts that came back from the tier."""
    stored: float
    """Bytes of contexts that went to the tier."""
    streamed: float
    """Bytes that passes read of the tier."""
    linked: float
    """Seconds in which the link to the device was used."""
    tier_peak: float
    """Most bytes of idle contexts in the tier."""
    shared: int
    """Prompt tokens that were not computed, since they had been."""
    prompt_tokens: int
    """Of all prompts."""

    @property
    def tokens_per_second(self) -> float:
        """Of this rank's requests."""
        return self.tokens / self.seconds


@dataclass
class _Lookup:
    """A request whose pages are on their way."""

    ready: float
    number: int
    request: Request
    pinned: list[int]


@dataclass
class _Request:
    conversation: int
    turn: int
    arrived: float
    first: float = -1.0
    last: float = -1.0


@dataclass
class _Tier:
    """Pages of contexts in a tier, the least recently used first."""

    room: float
    page: float
    """Bytes of a page."""
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    peak: float = 0.0

    def put(self, key: bytes) -> bool:
        """Store a page; whether it was not there."""
        new = key not in self.held
        self.held[key] = None
        self.held.move_to_end(key)
        while len(self.held) * self.page > self.room and self.held:
            self.held.popitem(last=False)
        self.peak = max(self.peak, len(self.held) * self.page)
        return new


def simulate_run(
    pricer: PassPricer,
    work: GenerationWorkload,
    settings: Inference,
    *,
    room: float = math.inf,
    say: Callable[[str], None] = lambda _: None,
) -> SimulatedRun:
    """The run of one rank's requests. `room`: bytes of the tier for idle contexts.

    Raises ConfigError for a workload with more tokens than are simulated one by one, or a request that
    `inference.pages` does not hold.
    """
    return _Simulation(pricer, work, settings, room, say).result()


class _Simulation:
    def __init__(
        self,
        pricer: PassPricer,
        work: GenerationWorkload,
        settings: Inference,
        room: float,
        say: Callable[[str], None],
    ) -> None:
        self._pricer, self._work, self._settings, self._say = pricer, work, settings, say
        self._requests = -(-work.requests // pricer.model.split)
        total = self._requests * sum(work.prompt_of(turn) for turn in range(work.turns))
        if total > MOST_TOKENS:
            raise ConfigError(
                f"workload: {format_count(total)} prompt tokens on each rank are more than the "
                f"{format_count(MOST_TOKENS)} "
                "that are simulated request by request; lower workload.requests or workload.turns, or use plan "
                "--generate"
            )
        page = settings.page
        self._page = pricer.model.held(page)
        self._tier = _Tier(room, self._page) if pricer.split.idle else None
        pages = settings.pages or self._pages()
        needed = -(-(work.context - 1) // page)
        if needed > pages:
            raise ConfigError(
                f"a request needs {needed} pages of {page} tokens, and inference.pages is {pages}; raise it, or lower "
                "workload.answer_tokens"
            )
        self._pages_count = pages
        self._pool = PagePool(pages, settings.prefix_cache)
        self._scheduler = Scheduler(settings.batch, settings.rows, page, self._pool)
        self._arrivals: list[tuple[float, int, int]] = []
        for number in range(self._requests):
            at = number * pricer.model.split / work.rate if work.rate else 0.0
            heapq.heappush(self._arrivals, (at, number, 0))
        self._pending: list[_Lookup] = []
        self._of: dict[int, _Request] = {}
        self._now = self._link_free = self._linked = self._fetched = self._stored = self._streamed = 0.0
        self._done: list[_Request] = []
        self._answers = 0

    def _pages(self) -> int:
        """As many as the requests that run need, and, without a tier for them, all idle contexts and beginnings."""
        work, page = self._work, self._settings.page
        longest = -(-(work.context - 1) // page)
        batch = min(self._settings.batch, self._requests)
        running = longest * batch
        if self._tier is not None:
            # One more, so that a request's pages can come back while the others run.
            return running + longest
        if work.turns > 1:
            return longest * (self._requests + 1)
        if work.shared_prompts > 1 and work.shared_tokens:
            return running + -(-work.shared_tokens // page) * work.shared_prompts
        return running

    # Requests

    def _ids(self, conversation: int, turn: int) -> tuple[int, ...]:
        """Token ids of a prompt: the same where it is shared, others elsewhere."""
        work = self._work
        prompt = conversation * work.shared_prompts // max(1, self._requests)
        own = range(work.shared_tokens, work.prompt_of(turn))
        base = (1 << 40) + (conversation << 24)
        return (
            *(((prompt + 1) << 24) + at for at in range(work.shared_tokens)),
            *(base + at for at in own),
        )

    def _arrive(self, at: float, conversation: int, turn: int) -> None:
        request = Request(
            ids=self._ids(conversation, turn), sampling=Sampling(max_tokens=self._work.answer_tokens)
        )
        number = len(self._of)
        self._of[number] = _Request(conversation, turn, at)
        lookup = self._look_up(number, request)
        if lookup is None:
            self._scheduler.waiting.append((number, request))
        else:
            self._pending.append(lookup)

    def _look_up(self, number: int, request: Request) -> _Lookup | None:
        """Begin to copy what the tier has of a prompt and the device has not; None where that is nothing."""
        if self._tier is None or not self._pool.reuse:
            return None
        pinned, missing = [], []
        for key in keys_of(request.ids, self._settings.page):
            page = self._pool.share(key)
            if page is not None:
                pinned.append(page)
            elif key in self._tier.held:
                missing.append(key)
            else:
                break
        pages = self._pool.allocate(len(missing)) if missing else None
        if pages is None:
            self._pool.release(pinned)
            return None
        for key, page in zip(missing, pages, strict=True):
            self._pool.register(key, page)
            self._tier.put(key)
        size = len(missing) * self._page
        seconds = self._pricer.copy_seconds(size)
        self._link_free = max(self._now, self._link_free) + seconds
        self._linked += seconds
        self._fetched += size
        return _Lookup(self._link_free, number, request, [*pinned, *pages])

    def _admit_arrived(self) -> None:
        for one in [one for one in self._pending if one.ready <= self._now]:
            self._pending.remove(one)
            self._pool.release(one.pinned)
            self._scheduler.waiting.append((one.number, one.request))
        while self._arrivals and self._arrivals[0][0] <= self._now:
            self._arrive(*heapq.heappop(self._arrivals))

    # Passes

    def result(self) -> SimulatedRun:
        """Run until every request has its answer."""
        passes, bound = 0, 0.0
        limits: dict[str, float] = {}
        known: dict[PassLoad, PassCost] = {}
        while True:
            self._admit_arrived()
            chosen = self._scheduler.next_pass()
            if not chosen:
                times = [one.ready for one in self._pending] + [at for at, _, _ in self._arrivals[:1]]
                if not times:
                    break
                self._now = max(self._now, min(times))
                continue
            pieces = [Piece(segment.count, segment.first) for _, segment in chosen]
            ready = [one for one, segment in chosen if segment.end == len(one.tokens)]
            load = PassLoad.of(pieces, max(1, len(ready)))
            cost = known.get(load)
            if cost is None:
                cost = known[load] = self._pricer.price(load)
            self._now += cost.seconds
            passes += 1
            if passes % 1000 == 0:
                self._say(
                    f"{passes:,} passes, {len(self._done):,} of {self._requests * self._work.turns:,} answers"
                )
            bound += cost.bound
            limits[cost.limit] = limits.get(cost.limit, 0.0) + cost.seconds
            self._streamed += cost.copied
            self._linked += cost.linking
            self._scheduler.passed(chosen)
            for one in ready:
                self._took(one)
        assert not self._scheduler.waiting, "a request that was never admitted"
        return self._found(passes, bound, limits)

    def _took(self, one: Running) -> None:
        """A request has one token more."""
        found = self._of[one.number]
        found.first = self._now if found.first < 0 else found.first
        found.last = self._now
        token = (1 << 60) + len(one.tokens)
        one.tokens.append(token)
        one.answer.tokens.append(token)
        if len(one.answer.tokens) < one.request.sampling.max_tokens:
            return
        self._scheduler.end(one)
        self._done.append(found)
        if self._tier is not None:
            self._stored += sum(self._tier.put(key) for key in one.keys) * self._page
        if found.turn + 1 < self._work.turns:
            back = self._now + self._work.idle_seconds
            heapq.heappush(self._arrivals, (back, found.conversation, found.turn + 1))

    def _found(self, passes: int, bound: float, limits: dict[str, float]) -> SimulatedRun:
        work = self._work
        waits = sorted(one.first - one.arrived for one in self._done)
        steps: list[Any] = [
            (one.last - one.first) / (work.answer_tokens - 1) for one in self._done if work.answer_tokens > 1
        ]
        return SimulatedRun(
            seconds=self._now,
            passes=passes,
            tokens=len(self._done) * work.answer_tokens,
            first_token=median(waits),
            first_token_p90=waits[min(len(waits) - 1, math.ceil(0.9 * len(waits)) - 1)],
            between_tokens=median(steps) if steps else 0.0,
            bound=bound,
            limits=limits,
            cached=self._pages_count * self._settings.page,
            fetched=self._fetched,
            stored=self._stored,
            streamed=self._streamed,
            linked=self._linked,
            tier_peak=self._tier.peak if self._tier else 0.0,
            shared=self._scheduler.shared,
            prompt_tokens=sum(work.prompt_of(one.turn) for one in self._done),
        )
