"""Sizes of the KV cache: pages on the device and in each tier, rows of its staging buffers, and the bytes of these.

    device bytes = (pages + pinned) · page bytes + 2 · staging rows · largest row of a layer
                   + 2 · block · page bytes, with tiers
    page bytes   = tokens of a page · Σ over layers (bytes of a token's keys + bytes of its values)

Sizes are numbers of pages, so that a plan can be made before the model runs; bytes follow from the shapes of keys and
values that the layers were seen to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

BLOCK_BYTES = 512 * 1024
"""A transfer of fewer bytes does not use the link's bandwidth."""
LEAST = 3
"""Pages on the device with which any request runs, the rest of it in tiers."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches of a token: heads and head size of its keys and of its values, and bytes of an element."""

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
    """Bytes of one page of `page` tokens in all layers. A layer that caches nothing of its own is left out."""
    return page * sum(sum(one.planes) for one in layers)


def block_pages(page_bytes: int) -> int:
    """Pages of a block: as few as make `BLOCK_BYTES`."""
    return max(1, -(-BLOCK_BYTES // max(page_bytes, 1)))


def sizes_within(
    budget: int,
    layers: Sequence[LayerShape],
    page: int,
    *,
    longest: int,
    wanted: int,
    room: Mapping[str, int],
) -> KVCacheSizes | None:
    """The largest KV cache in `budget` bytes of the device, with `room` bytes in tiers by name. `longest`: pages of the
    longest request; `wanted`: of all requests that run at once. None where the budget is below `least_bytes`.

    Everything lies on the device where that fits, and tiers then hold prefixes only.
    """
    size = page_bytes(layers, page)
    block = block_pages(size)
    tiers = {name: count // (block * size) * block for name, count in room.items()}
    staging = longest * page
    fixed = KVCacheSizes(device=0, staging=staging, block=block, **tiers)
    device = min((budget - fixed.device_bytes(layers, page)) // size, wanted)
    return (
        replace(fixed, device=device) if device >= min(longest, LEAST if fixed.tiered else longest) else None
    )


def least_bytes(layers: Sequence[LayerShape], page: int, *, longest: int, tiered: bool) -> int:
    """The smallest budget with which `sizes_within` finds sizes: without tiers the longest request is on the device."""
    least = KVCacheSizes(
        device=min(longest, LEAST) if tiered else longest,
        host=int(tiered),
        staging=longest * page,
        block=block_pages(page_bytes(layers, page)),
    )
    return least.device_bytes(layers, page)
