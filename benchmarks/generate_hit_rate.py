"""Hit rates of the prefix cache on three traces: the engine's eviction beside LRU and Belady's optimum.

    python benchmarks/generate_hit_rate.py

Writes benchmarks/results/generate_hit_rate.json and the table in docs/inference-memory.md. Traces are made by a seeded
generator: requests at simulated times, each a list of pages of its prompt. The cache holds a number of pages; a request
hits the pages from its first on that are in the cache. Belady's optimum evicts the page whose next use is furthest
away, and may leave out a new page.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from commandline import run
from pages import Benchmark, table

from hyper_parallel.inference.kv_cache.tiers import SAMPLE, PredictedUse

PAGE = 32
"""Tokens."""
SHARES = (0.1, 0.25)
"""Sizes of the cache, as shares of all different pages that are used twice or more."""
Request = tuple[Hashable, ...]
"""The pages of its prompt."""


def chat(draws: random.Random) -> list[Request]:
    """Conversations of several turns with log-normal think times (median 40 s): each turn adds to the prompt."""
    events: list[tuple[float, int, int]] = []
    time = 0.0
    for session in range(600):
        time += draws.expovariate(1 / 2.0)
        heapq.heappush(events, (time, session, 0))
    length: dict[int, int] = {}
    found: list[Request] = []
    while events:
        now, session, turn = heapq.heappop(events)
        length[session] = length.get(session, 0) + draws.randint(2, 24)
        found.append(tuple((session, place) for place in range(length[session])))
        if draws.random() < 0.75:
            heapq.heappush(events, (now + 5 + draws.lognormvariate(math.log(40), 1.0), session, turn + 1))
    return found


def shared(draws: random.Random) -> list[Request]:
    """System prompts of Zipf popularity, each followed by a question of its own; what is popular drifts."""
    sizes = [draws.randint(8, 120) for _ in range(400)]
    ranks = list(range(400))
    found: list[Request] = []
    for number in range(3000):
        if number % 500 == 499:
            for _ in range(40):
                one, other = draws.randrange(400), draws.randrange(400)
                ranks[one], ranks[other] = ranks[other], ranks[one]
        which = ranks[min(int(draws.paretovariate(0.9)) - 1, 399)]
        own = draws.randint(1, 6)
        found.append(
            tuple(("system", which, place) for place in range(sizes[which]))
            + tuple(("question", number, place) for place in range(own))
        )
    return found


def agents(draws: random.Random) -> list[Request]:
    """Agents that call tools in a loop: a shared beginning for each of 12 kinds, and steps of a few seconds, some of
    which wait for a slow tool; each appends its result."""
    events: list[tuple[float, int]] = []
    time = 0.0
    for agent in range(300):
        time += draws.expovariate(1 / 4.0)
        heapq.heappush(events, (time, agent))
    kinds = [draws.randint(20, 80) for _ in range(12)]
    kind = [min(int(draws.paretovariate(1.0)) - 1, 11) for _ in range(300)]
    length = dict.fromkeys(range(300), 0)
    found: list[Request] = []
    while events:
        now, agent = heapq.heappop(events)
        length[agent] += draws.randint(1, 16)
        found.append(
            tuple(("kind", kind[agent], place) for place in range(kinds[kind[agent]]))
            + tuple((agent, place) for place in range(length[agent]))
        )
        if draws.random() < 0.9:
            wait = draws.uniform(60, 240) if draws.random() < 0.2 else draws.uniform(2, 8)
            heapq.heappush(events, (now + wait, agent))
    return found


class Lru:
    """The least recently used first; of a prompt, the last page."""

    def used(self, keys: Sequence[Hashable]) -> None:
        """Nothing to learn."""

    def entered(self, key: Hashable) -> None:
        """Nothing to learn."""

    left = entered

    def first(self, candidates: Mapping[Hashable, object], some: Sequence[Hashable]) -> Hashable:
        return next(iter(candidates))


def hits(trace: Sequence[Request], room: int, policy: Lru | PredictedUse) -> int:
    """Pages of prompts that are found, with room for so many."""
    cached: dict[Hashable, None] = {}
    names: list[Hashable] = []
    places: dict[Hashable, int] = {}
    draws = random.Random(0)
    found = 0
    for request in trace:
        policy.used(request)
        whole = True
        for key in request:
            whole = whole and key in cached
            found += whole
        for key in reversed(request):
            if key in cached:
                del cached[key]
            else:
                policy.entered(key)
                places[key] = len(names)
                names.append(key)
            cached[key] = None
        while len(cached) > room:
            key = policy.first(cached, [draws.choice(names) for _ in range(SAMPLE)])
            del cached[key]
            policy.left(key)
            last, place = names.pop(), places.pop(key)
            if last != key:
                names[place], places[last] = last, place
    return found


def optimum(trace: Sequence[Request], room: int) -> int:
    """As `hits`, with Belady's choice (1966)."""
    after: dict[Hashable, int] = {}
    following: list[list[int]] = []
    for place in reversed(range(len(trace))):
        following.append([after.get(key, len(trace)) for key in trace[place]])
        after.update(dict.fromkeys(trace[place], place))
    cached: dict[Hashable, int] = {}
    order: list[tuple[int, int, Hashable]] = []
    found = count = 0
    for request, nexts in zip(trace, reversed(following), strict=True):
        whole = True
        for key in request:
            whole = whole and key in cached
            found += whole
        for key, following_use in zip(request, nexts, strict=True):
            count += 1
            cached[key] = following_use
            heapq.heappush(order, (-following_use, -count, key))
        while len(cached) > room:
            furthest, _, key = heapq.heappop(order)
            if cached.get(key) == -furthest:
                del cached[key]
    return found


TRACES: dict[str, Callable[[random.Random], list[Request]]] = {
    "multi-turn chat": chat,
    "shared system prompts": shared,
    "agent loops": agents,
}


def page(result: Mapping[str, Any]) -> Iterator[str]:
    rates = ("lru", "predicted", "belady")
    yield from table(
        "Trace | pages in the cache | LRU | predicted next use | Belady",
        ((row["trace"], row["pages"], *(f"{row[rate]:.1f}%" for rate in rates)) for row in result["rows"]),
    )


BENCHMARK = Benchmark("generate_hit_rate", {"inference-memory.md": page})


def main() -> None:
    rows = []
    for name, make in TRACES.items():
        trace = make(random.Random(f"trace of {name}"))
        counts = Counter(key for request in trace for key in request)
        pages = counts.total()
        about: dict[str, Any] = {"trace": name, "requests": len(trace), "tokens": pages * PAGE}
        for share in SHARES:
            room = int(share * sum(count > 1 for count in counts.values()))
            found = {
                "lru": hits(trace, room, Lru()),
                "predicted": hits(trace, room, PredictedUse()),
                "belady": optimum(trace, room),
            }
            rates = {policy: round(100 * count / pages, 2) for policy, count in found.items()}
            rows.append({**about, "pages": room, "share": share, **rates})
            print(rows[-1], flush=True)
    BENCHMARK.keep({"page": PAGE, "rows": rows})


if __name__ == "__main__":
    run(main)
