"""Memory plan of generation: a byte budget divided into weights, stream buffer, KV pages, staging and workspace.

    budget ≥ fixed + resident weights + buffer + KV pages + staging + workspace

Weights that are not resident are read in every pass, each byte once, through the buffer, which holds any two modules
that follow one another: one computes while the next is read. A pass that reads R bytes takes about R / link seconds
more than its compute, whatever the number of its requests; so of several numbers b of requests the plan takes the one
with the fewest bytes for each token (zig-zag order; Sheng et al. 2023, FlexGen, section 4):

    cost(b) = (R(b) + C(b) + W · link / device) / b                                                 (`MemoryPlan.cost`)

with W the bytes of all weights, which the device reads from its own memory in each pass, and C the bytes of contexts
that a pass reads from tiers. Where a token chooses K of the E experts of a mixture, R counts those that b tokens
choose on average where all are chosen alike: each with probability 1 − (1 − K/E)ᵇ (`MemoryPlan.expected`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes, KVChoice

LINK_SHARE = 1 / 40
"""Bandwidth of the link to a tier, as a share of the device's memory: 1/50 (H100, PCIe 5) to 1/32 (Ascend 910C). It
decides only between numbers of requests."""

_NO_CACHE = KVChoice(KVCacheSizes(device=0))


@dataclass(frozen=True)
class Module:
    """A module whose weights stay on the device or are streamed, as one."""

    name: str
    bytes: int
    gatherable: bool = False
    """An embedding: a pass needs a few of its rows, which are gathered where the table lies."""
    chance: float = 1.0
    """That one token needs it: of an expert, K/E."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model."""

    modules: tuple[Module, ...]
    """In the order of the forward pass."""
    fixed: int
    """Of weights and buffers that always are on the device."""
    page: int
    """Of a page of the KV cache, all layers together."""

    @property
    def weights(self) -> int:
        """All bytes of weights."""
        return self.fixed + sum(module.bytes for module in self.modules)


@dataclass(frozen=True)
class MemoryPlan:
    """How a budget is used. All sizes are in bytes."""

    sizes: Sizes
    resident: frozenset[int]
    """Places of the modules whose weights stay on the device."""
    gathered: frozenset[int]
    """Places of the tables whose rows are gathered in a tier."""
    buffer: int
    """Of the buffer of streamed weights."""
    requests: int
    """Requests that run at once."""
    pages: int
    """Pages of the KV cache on the device."""
    workspace: int
    """Of everything else that a pass computes, measured."""
    staging: int = 0
    """Of the buffers of contexts that do not lie in one piece, and of transfers."""
    cache: KVChoice = _NO_CACHE
    """Sizes of the KV cache."""

    @property
    def streamed(self) -> tuple[int, ...]:
        """Places of the modules that each pass reads."""
        return tuple(
            place
            for place in range(len(self.sizes.modules))
            if place not in self.resident and place not in self.gathered
        )

    @property
    def read(self) -> int:
        """Bytes that a pass reads, at most: not all experts are chosen in each."""
        return sum(self.sizes.modules[place].bytes for place in self.streamed)

    @cached_property
    def expected(self) -> float:
        """Bytes that a pass reads on average, with a token of each request."""
        modules = [self.sizes.modules[place] for place in self.streamed]
        return sum(one.bytes * (1 - (1 - one.chance) ** self.requests) for one in modules)

    @property
    def device(self) -> int:
        """On the device at once, at most."""
        resident = sum(self.sizes.modules[place].bytes for place in self.resident)
        cache = self.pages * self.sizes.page
        return self.sizes.fixed + resident + self.buffer + cache + self.staging + self.workspace

    @property
    def cost(self) -> float:
        """Bytes over the link for each token, compute included as what the device reads."""
        return (self.expected + self.cache.read + LINK_SHARE * self.sizes.weights) / self.requests


def make_plan(
    sizes: Sizes, budget: int, *, requests: int, pages: int, workspace: int, staging: int = 0
) -> MemoryPlan | None:
    """The plan with the fewest bytes to read in a pass; None where the budget is below `smallest`."""
    room = budget - sizes.fixed - pages * sizes.page - workspace - staging
    places = range(len(sizes.modules))
    tables = frozenset(place for place in places if sizes.modules[place].gatherable)
    best: tuple[tuple[float, int, int], MemoryPlan] | None = None
    rest = [place for place in places if place not in tables]
    for gathered in dict.fromkeys((frozenset[int](), tables)):
        whole_tables = tables - gathered
        left = room - sum(sizes.modules[place].bytes for place in whole_tables)
        for largest in sorted({0, *(sizes.modules[place].bytes for place in rest)}):
            resident = _resident(sizes.modules, rest, largest, left)
            if resident is None:
                continue
            streamed = [place for place in rest if place not in resident]
            used = sum(sizes.modules[place].bytes for place in resident)
            # The whole rest is buffer, up to all that is streamed: modules are read as early as there is room.
            most = sum(sizes.modules[place].bytes for place in streamed)
            buffer = min(left - used, max(pair_bytes(sizes.modules, streamed), most)) if streamed else 0
            plan = MemoryPlan(
                sizes, resident | whole_tables, gathered, buffer, requests, pages, workspace, staging
            )
            order = (plan.expected, plan.read, len(gathered))
            if best is None or order < best[0]:
                best = (order, plan)
    return None if best is None else best[1]


def smallest(sizes: Sizes, *, pages: int, workspace: int, staging: int = 0) -> int:
    """The smallest budget for which there is a plan."""
    rest = [place for place, module in enumerate(sizes.modules) if not module.gatherable]
    weights = min(
        sum(sizes.modules[place].bytes for place in rest if sizes.modules[place].bytes > largest)
        + pair_bytes(sizes.modules, [place for place in rest if sizes.modules[place].bytes <= largest])
        for largest in {0, *(sizes.modules[place].bytes for place in rest)}
    )
    return sizes.fixed + weights + pages * sizes.page + workspace + staging


def pair_bytes(modules: Sequence[Module], streamed: Sequence[int]) -> int:
    """The smallest buffer: two modules that follow one another, the first again behind the last; of one module its
    bytes, since it is read for the next pass only when it has computed."""
    count = len(streamed)
    if count < 2:
        return sum(modules[place].bytes for place in streamed)
    return max(
        modules[place].bytes + modules[streamed[(index + 1) % count]].bytes
        for index, place in enumerate(streamed)
    )


def _resident(
    modules: Sequence[Module], rest: Sequence[int], largest: int, room: int
) -> frozenset[int] | None:
    """Modules that stay: all above `largest`, and as many others as leave `room` for the buffer; first those that every
    pass needs, each kind spread evenly over the pass, so that reads go on all the time. None where there is no room
    for those that must stay."""
    stay = {place for place in rest if modules[place].bytes > largest}
    room -= sum(modules[place].bytes for place in stay)
    may = [place for place in rest if place not in stay]
    if room >= sum(modules[place].bytes for place in may):
        return frozenset([*stay, *may])
    least = pair_bytes(modules, may)
    if room < least:
        return None
    free, chosen = room - least, list[int]()
    for group in (
        [place for place in may if modules[place].chance == 1],
        [place for place in may if modules[place].chance < 1],
    ):
        chosen += (some := _spread(modules, group, free))
        free -= sum(modules[place].bytes for place in some)
    # Where small modules stay, large ones follow one another, and need a larger buffer.
    while chosen:
        gone = set(chosen)
        missing = pair_bytes(modules, [place for place in may if place not in gone]) - least - free
        if missing <= 0:
            break
        while chosen and missing > 0:
            count = modules[chosen.pop()].bytes
            free, missing = free + count, missing - count
    return frozenset([*stay, *chosen])


def _spread(modules: Sequence[Module], places: Sequence[int], free: int) -> list[int]:
    """Some of these, evenly spread, that together have at most `free` bytes."""
    total = sum(modules[place].bytes for place in places)
    share, credit, chosen = min(free / total, 1.0) if total else 0.0, 0.0, dict[int, None]()
    for place in places:
        credit += modules[place].bytes * share
        if credit >= modules[place].bytes and modules[place].bytes <= free:
            credit -= modules[place].bytes
            free -= modules[place].bytes
            chosen[place] = None
    for place in sorted(places, key=lambda place: -modules[place].bytes):
        if place not in chosen and modules[place].bytes <= free:
            free -= modules[place].bytes
            chosen[place] = None
    return list(chosen)
