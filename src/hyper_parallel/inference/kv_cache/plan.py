"""Where the KV cache of some requests may lie: pages on the device and in tiers, and the bytes that a pass reads.

For b requests at once, of P_i pages each, three kinds of sizes come into question (`kv_choices`):

- all pages of the b longest on the device, and no tiers;
- the same, and tiers for prefixes and for requests that are swapped out;
- d pages on the device, fewer than the longest request has: requests longer than that are streamed. Each of them keeps
  a share of d on the device, and a pass reads the rest,

    read(b, d) = page bytes · Σ over the b longest, i with P_i > d, of (P_i - d / b)

Which is best depends on the memory that is left for weights, so that a plan for both is made for each (`budget.needs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hyper_parallel.inference.kv_cache.sizes import LEAST, KVCacheSizes, LayerShape, block_pages, page_bytes

ALIGN = 4096
"""Bytes at a multiple of which a slot of any tier begins."""
_KEPT = 64 << 20
"""Bytes of tiers that are taken at least where there is room, for prefixes of runs to come."""


@dataclass(frozen=True)
class KVChoice:
    """Sizes of the cache. `tiered`: it outlives runs, and has tiers."""

    sizes: KVCacheSizes
    read: int = 0
    """Bytes that a pass reads of contexts in tiers, at most."""

    @property
    def tiered(self) -> bool:
        """Whether there are tiers."""
        return self.sizes.tiered > 0


@dataclass(frozen=True, kw_only=True)
class KVDemand:
    """What requests need of the cache."""

    shapes: tuple[LayerShape, ...]
    page: int
    """Tokens of a page, as this process stores it."""
    pages: tuple[int, ...]
    """Of each request at its end, the longest first."""
    room: Mapping[str, int]
    """Bytes of tiers, the fastest first."""
    device: int | None = None
    """Pages on the device, where somebody has set their number."""
    pinned: int = 0
    """Further ones, of prompts that are pinned."""

    @property
    def bytes(self) -> int:
        """Of a page."""
        return page_bytes(self.shapes, self.page)


def kv_choices(demand: KVDemand, count: int) -> Iterator[KVChoice]:
    """Sizes with which `count` of the requests run at once."""
    device = demand.device or sum(demand.pages[:count])
    longest = demand.pages[0]
    staging = longest * demand.page
    plain = KVChoice(KVCacheSizes(device=device, staging=staging, pinned=demand.pinned))
    found = [*_tiered_choices(demand, count, device)]
    # Where a number of pages that was set has no room for the longest request, the run says so.
    alone = not demand.room or (count == 1 and not found)
    yield from [plain, *found] if longest <= device or alone else found


def _tiered_choices(demand: KVDemand, count: int, device: int) -> Iterator[KVChoice]:
    longest = demand.pages[0]
    staging = longest * demand.page
    blocks = dict.fromkeys((block_pages(demand.bytes), 1))
    for block in blocks if demand.room and demand.bytes else ():
        if longest <= device:
            whole = KVCacheSizes(device=device, staging=staging, block=block, pinned=demand.pinned)
            if (found := _with_tiers(demand, whole, 0)) is not None:
                yield KVChoice(found)
        for fewer in _fewer(demand, count):
            streamed = KVCacheSizes(
                device=fewer,
                staging=staging,
                block=block,
                group=_group(demand, count, fewer, block),
                pinned=demand.pinned,
            )
            slots = _streamed_slots(demand, count, streamed)
            if slots and (found := _with_tiers(demand, streamed, slots)) is not None:
                tail = fewer // count
                read = sum(pages - tail for pages in demand.pages[:count] if pages > fewer)
                yield KVChoice(found, read * demand.bytes)


def _fewer(demand: KVDemand, count: int) -> list[int]:
    """Numbers of pages on the device that are fewer than the longest request has."""
    longest = demand.pages[0]
    if demand.device is not None:
        return [demand.device] if LEAST <= demand.device < longest else []
    found, pages = [], max(LEAST, 2 * count)
    while pages < longest:
        found.append(pages)
        pages *= 2
    return [*found, longest - 1] if found and found[-1] < longest - 1 else found


def _group(demand: KVDemand, count: int, device: int, block: int) -> int:
    """Pages of a group: as many as a slot has room for, and of which every request has one on the device."""
    plane = demand.page * max(max(one.planes) for one in demand.shapes)
    return max(1, min(block * demand.bytes // plane, device // max(count, 2) - 1))


def _streamed_slots(demand: KVDemand, count: int, sizes: KVCacheSizes) -> int:
    """Slots for the contexts of the streamed requests; 0 where `count` requests have no room on the device."""
    assert sizes.group is not None
    some = demand.pages[:count]
    streamed = [pages for pages in some if pages > sizes.device]
    if len(streamed) * (sizes.group + 1) + sum(some) - sum(streamed) > sizes.device:
        return 0
    return 2 * len(demand.shapes) * sum(-(-pages // sizes.group) for pages in streamed)


def _with_tiers(demand: KVDemand, sizes: KVCacheSizes, slots: int) -> KVCacheSizes | None:
    """The sizes with pages in tiers: `slots` of a block each, and others for all requests and their prefixes, the
    fastest tier first. None where the tiers have no room for `slots`."""
    slot = -(-sizes.block * demand.bytes // ALIGN) * ALIGN
    left = slots + max(-(-sum(demand.pages) // sizes.block), -(-_KEPT // slot))
    tiers = {}
    for name, bytes_ in demand.room.items():
        taken = min(bytes_ // slot, left)
        left -= taken
        tiers[name] = taken * sizes.block
    found = replace(sizes, **tiers)
    return found if found.tiered >= max(slots, 1) * sizes.block else None
