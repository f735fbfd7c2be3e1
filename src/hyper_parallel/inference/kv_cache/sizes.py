"""Sizes of the KV cache: pages on the device and in each tier, rows of its staging buffers, and the bytes of these.

    device bytes = (pages + pinned) · page bytes + 2 · staging rows · largest row of a layer
                   + 2 · block · page bytes, with tiers
    page bytes   = tokens of a page · Σ over layers (bytes of a token's keys + bytes of its values)

Sizes are numbers of pages, so that a plan can be made before the model runs; bytes follow from the shapes of keys and
values that the layers were seen to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.units import round_up

BLOCK_BYTES = 512 * 1024
"""A transfer of fewer bytes does not use the link's bandwidth."""
LEAST = 3
"""Pages on the device with which any request runs, the rest of it in tiers."""


@dataclass(frozen=True)
class LayerShape:
    """The cache of one layer for a token: heads and head size of its keys and of its values, and bytes of an
    element."""

    keys: tuple[int, int]
    values: tuple[int, int]
    itemsize: int

    @property
    def planes(self) -> tuple[int, int]:
        """Bytes of a token's keys, and of its values."""
        return (
            self.keys[0] * self.keys[1] * self.itemsize,
            self.values[0] * self.values[1] * self.itemsize,
        )


@dataclass(frozen=True, kw_only=True)
class KVCacheSizes:
    """Pages of all layers on the device and, at most, in each tier."""

    device: int
    host: int = 0
    pool: int = 0
    flash: int = 0
    staging: int = 0
    """Rows (tokens) of each of the two staging buffers, which hold keys and values of one layer of one request; 0: as
    many as the longest request has."""
    block: int = 1
    """Pages that are moved together, so that a transfer has `BLOCK_BYTES` or more (`block_pages`)."""
    group: int | None = None
    """Pages of a group of a streamed context; None: as many as half of the pages on the device are. A streamed request
    runs with a group and one more page on the device."""
    pinned: int = 0
    """Further pages on the device, of prompts that are pinned."""

    @property
    def tiered(self) -> int:
        """Pages in all tiers together."""
        return self.host + self.pool + self.flash

    def device_bytes(self, layers: Sequence[LayerShape], page: int) -> int:
        """Bytes on the device: pages of `page` tokens, staging buffers and, where there are tiers, transfer buffers."""
        rows = sum(max((one.planes[which] for one in layers), default=0) for which in range(2))
        pages = self.device + self.pinned + (2 * self.block if self.tiered else 0)
        return pages * page_bytes(layers, page) + 2 * self.staging * rows


def page_bytes(layers: Sequence[LayerShape], page: int) -> int:
    """Bytes of one page of `page` tokens in all layers. A layer that caches nothing itself is left out."""
    return page * sum(sum(one.planes) for one in layers)


def block_pages(page_bytes: int) -> int:
    """Pages of a block: as few as make `BLOCK_BYTES`."""
    return max(1, -(-BLOCK_BYTES // max(page_bytes, 1)))


# Where the KV cache of some requests may lie: pages on the device and in tiers, and the bytes that a pass reads.
#
# For b requests at once, of P_i pages each, three kinds of sizes come into question (`kv_choices`):
#
# - all pages of the b longest on the device, and no tiers;
# - the same, and tiers for prefixes and for requests that are swapped out;
# - d pages on the device, fewer than the longest request has: requests longer than that are streamed. Each of them
# keeps
#   a share of d on the device, and a pass reads the rest,
#
#     read(b, d) = page bytes · Σ over the b longest, i with P_i > d, of (P_i - d / b)
#
# Which is best depends on the memory that is left for weights, so that a plan for both is made for each
# (`budget.needs`).

ALIGN = 4096
"""Alignment of the slots of all tiers, in bytes."""
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
    """The pages that requests need."""

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
        """Bytes of a page."""
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
    slot = round_up(sizes.block * demand.bytes, ALIGN)
    left = slots + max(-(-sum(demand.pages) // sizes.block), -(-_KEPT // slot))
    tiers = {}
    for name, bytes_ in demand.room.items():
        taken = min(bytes_ // slot, left)
        left -= taken
        tiers[name] = taken * sizes.block
    found = replace(sizes, **tiers)
    return found if found.tiered >= max(slots, 1) * sizes.block else None
