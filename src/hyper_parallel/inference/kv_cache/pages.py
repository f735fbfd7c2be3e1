"""Storage of the paged KV cache: the pages of a layer, int8 rows, staging buffers, and contexts streamed from tiers.

Layout [pages · tokens of a page, heads, head size]: the rows of a contiguous run of pages are one view, which attention
reads without a copy; int8 pages have scales behind the values of each head, and are unpacked into a buffer before
attention reads them. Tensors are made when a layer first writes, since only then its heads and sizes are known; two
values of one layer may have different sizes (latents of MLA and their rotary keys).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.inference.kv_cache.sizes import LayerShape
from hyper_parallel.inference.kv_cache.tiers import KVTiers
from hyper_parallel.inference.ragged_pass import RaggedPass, Segment
from hyper_parallel.offloading.tiers import Pending


class LayerPages:
    """Keys and values of one layer."""

    def __init__(
        self,
        pages: int,
        page: int,
        staging: Staging,
        keys_1HTD: Tensor,
        values_1HTD: Tensor,
        unpacked: Staging | None = None,
    ) -> None:
        """For values like `keys_1HTD` and `values_1HTD`, of any number of tokens. `unpacked`: buffers for the values of
        int8 pages, which these then are."""
        self.page = page
        self.staging, self._buffers = staging, unpacked
        self.like = (keys_1HTD[:, :, :0].clone(), values_1HTD[:, :, :0].clone())
        """Keys and values of no token, [1, H, 0, D], in the dtype of the model."""
        self.stores = [
            torch.empty(
                pages * page,
                x.size(1),
                x.size(3) if unpacked is None else packed_size(x.size(3)),
                dtype=x.dtype if unpacked is None else torch.int8,
                device=x.device,
            )
            for x in self.like
        ]
        """Of keys and of values, [rows, H, D], or int8 [rows, H, D with scales]."""
        keys, values = (store.transpose(0, 1).unsqueeze(0) for store in self.stores)
        self.rows = (keys, values)
        """The same, in the order of attention's dims: [1, H, rows, ...]."""

    def write(self, rows: Tensor, keys_1HTD: Tensor, values_1HTD: Tensor) -> None:
        """Write token t of the first `len(rows)` to row `rows[t]`."""
        for store, x in zip(self.stores, (keys_1HTD, values_1HTD), strict=True):
            new = x[0, :, : len(rows)].transpose(0, 1)
            store.index_copy_(0, rows, new if self._buffers is None else pack(new))

    def copy(self, page: int, target: int) -> None:
        """Copy a page to another one."""
        for store in self.stores:
            pages = store.view(-1, self.page, *store.shape[1:])
            pages[target].copy_(pages[page])

    @property
    def shape(self) -> LayerShape:
        """The shape that it holds for a token."""
        return shape_of(*self.like, int8=self._buffers is not None)

    def read(self, rows: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, S, ...] of some rows, as the stores have them. Views, or of several slices copies in
        the staging buffers, which the next such call of any layer overwrites."""
        if len(rows) == 1:
            parts = [store[rows[0]] for store in self.stores]
        else:
            count = sum(one.stop - one.start for one in rows)
            parts = []
            for which, store in enumerate(self.stores):
                parts.append(self.staging.view(which, store, count))
                torch.cat([store[one] for one in rows], out=parts[-1])
        return parts[0].transpose(0, 1).unsqueeze(0), parts[1].transpose(0, 1).unsqueeze(0)

    def unpacked(self, *stored: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, S, D] as attention reads them, of stored ones [1, H, S, ...]; of int8 pages in buffers
        that the next such call of any layer overwrites."""
        if self._buffers is None:
            keys, values = stored
            return keys, values
        parts = []
        for which, (packed, like) in enumerate(zip(stored, self.like, strict=True)):
            # The layout of a store of the model's dtype, wherever the packed rows lie.
            one = like.new_empty(1, like.size(1), like.size(3))
            room = self._buffers.view(which, one, packed.size(2), 0)
            parts.append(unpack(packed[0].transpose(0, 1), room).transpose(0, 1).unsqueeze(0))
        return parts[0], parts[1]


def shape_of(keys_1HTD: Tensor, values_1HTD: Tensor, *, int8: bool) -> LayerShape:
    """The shape that a layer with such keys and values stores for a token."""
    keys, values = (
        (x.size(1), packed_size(x.size(3)) if int8 else x.size(3)) for x in (keys_1HTD, values_1HTD)
    )
    return LayerShape(keys, values, 1 if int8 else keys_1HTD.itemsize)


# Int8 rows of the KV cache: symmetric quantization in groups along the head size, with bfloat16 scales beside them.
#
# For each token and head, and each of G groups of its values x (`pack`, `unpack`):
#
#     s = bf16(max |x| / 127.5),   q = clamp(round(x / s), -127, 127),   x' = q · s
#
# A head of D values is D + 2 G bytes: the q of all groups, then the scales. A token is rounded by itself, when it is
# written: its bits depend neither on the tokens around it nor on how heads are spread over ranks. Grids along tokens
# (KIVI, Liu et al. 2024: keys per channel) need a window of tokens that are not rounded yet, so that a token's values
# would change with its age. Small groups keep channels of large keys apart from the others instead.
#
# bfloat16 has the range of float32, so that no scale overflows; and as s is found from 127.5, no x' exceeds max |x|. A
# group with an infinity or a NaN is read as NaN and infinities.

GROUP = 32
"""Values that share a scale, at most, where the head size has such a divisor."""
_LEAST = 8
"""A group of fewer values would be mostly scales."""
_SCALE_BYTES = 2


def groups_of(size: int) -> int:
    """Groups of a head of `size` values: as few equal ones of at most `GROUP` as there are, or one."""
    found = next((count for count in range(-(-size // GROUP), size + 1) if size % count == 0), 1)
    return found if size // max(found, 1) >= _LEAST else 1


def packed_size(size: int) -> int:
    """Bytes of a head of `size` values with its scales."""
    return size + _SCALE_BYTES * groups_of(size)


def pack(x: Tensor) -> Tensor:
    """Values [..., D] as int8 [..., D + 2 G]."""
    grouped = x.float().unflatten(-1, (groups_of(x.size(-1)), -1))
    scales = (grouped.abs().amax(-1, keepdim=True) / 127.5).bfloat16()
    # 0 / 0 is a zero, and so is whatever a scale that is not finite makes NaN or infinite when it is read.
    rounded = (grouped / scales).nan_to_num_(0.0, 127.0, -127.0).round_().clamp_(-127, 127)
    return torch.cat([rounded.flatten(-2).to(torch.int8), scales.squeeze(-1).view(torch.int8)], -1)


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """`out` [..., D], with the values of int8 [..., D + 2 G]."""
    size = out.size(-1)
    scales = packed[..., size:].contiguous().view(torch.bfloat16).unsqueeze(-1)
    out.copy_(packed[..., :size])
    # A product of an int8 and a bfloat16 is exact in float32, so that it is rounded once, to the dtype of `out`.
    if out.dtype != torch.float16:
        scales = scales.to(out.dtype)
    out.unflatten(-1, (groups_of(size), -1)).mul_(scales)
    return out


# Staging buffers: keys and values of one layer of one request in one piece, shared by all layers.
#
# There are two of each, so that one can be filled while attention reads the other. A buffer is made when it is first
# needed, since only then the sizes are known, and grows to the largest layer. The unpacked values of int8 pages have
# buffers like these, one of each, since attention is over when the next context is unpacked.


class Staging:
    """Two buffers for keys and two for values, each of at least `rows` tokens."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.side = 0
        """The buffer that attention read last: the other one may be being filled."""
        self._buffers: dict[tuple[int, int], Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the buffers that were made."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        """Give up the buffers."""
        self._buffers.clear()

    def view(self, which: int, like: Tensor, rows: int, side: int | None = None) -> Tensor:
        """Room for `rows` tokens of keys (`which` 0) or values (1) as a store `like` [·, H, D] has them, in one of the
        two buffers, by default the one that was read last. What was there is overwritten."""
        side = self.side if side is None else side
        wanted = max(rows, self.rows) * like[0].nbytes if len(like) else 0
        buffer = self._buffers.get((which, side))
        if buffer is None or buffer.numel() < wanted:
            self._buffers.pop((which, side), None)
            del buffer
            buffer = torch.empty(wanted, dtype=torch.uint8, device=like.device)
            self._buffers[which, side] = buffer
        return buffer[: rows * like[0].nbytes].view(like.dtype).view(rows, *like.shape[1:])


# Streamed contexts: keys and values of a request that lie in tiers are read layer by layer into staging buffers.
#
# The older pages of a long request lie in groups: a block for the keys and one for the values of each layer, so that a
# layer reads its own alone. While attention computes on one staging buffer, the next layer's (or the next request's)
# blocks are read into the other: the order of the pass before says which they are. Attention is given the whole context
# in one piece, as if it lay on the device, and so has the same bits.
#
# Groups before a sliding window are not read.


@dataclass(eq=False)
class _Fetch:
    """One layer of one segment on its way into a staging buffer, from token `low` on."""

    layer: int
    segment: Segment
    low: int
    side: int
    views: tuple[Tensor, Tensor]
    pending: list[Pending]


class StreamReader:
    """Reads contexts of the pass under way. Not for several threads."""

    def __init__(self, staging: Staging, tiers: KVTiers, layers: Sequence[LayerPages | None]) -> None:
        """`layers`: the pages of each."""
        self._staging, self._tiers, self._layers = staging, tiers, list(layers)
        self._next: _Fetch | None = None
        self._order: list[int] = []
        self._seen: list[int] = []
        self._first: dict[int, int] = {}
        """Of each layer: the first token that was last read, from the segment's end; none where it was token 0."""
        self._segments: list[Segment] = []

    def begin(self, ragged: RaggedPass) -> None:
        """A pass begins: read the first layer of its first streamed segment."""
        self._drop()
        self._segments = [one for one in ragged.segments if one.older]
        self._order, self._seen = self._seen or self._order, []
        if self._segments and self._order:
            self._prefetch(self._order[0], self._segments[0])

    def read(self, layer: int, segment: Segment, first: int, rows: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, end - first, D] of a segment from token `first`, which is in a tier, on. `rows`: those
        on the device. Raises TierError."""
        found, self._next = self._next, None
        if found is None or (found.layer, found.segment) != (layer, segment) or found.low > first:
            self._settle(found)
            found = self._fetch(layer, segment, first)
        self._settle(found)
        pages = self._layers[layer]
        assert pages is not None
        for store, view in zip(pages.stores, found.views, strict=True):
            torch.cat([store[one] for one in rows], out=view[segment.base - found.low :])
        self._staging.side = found.side
        if not self._seen or self._seen[-1] != layer:
            self._seen.append(layer)
        self._first.pop(layer, None)
        if first:
            self._first[layer] = first - segment.end
        self._ahead(layer, segment)
        keys, values = (view[first - found.low :].transpose(0, 1).unsqueeze(0) for view in found.views)
        return keys, values

    def clear(self) -> None:
        """Give up what is being read."""
        self._next, self._segments, self._layers = None, [], []

    def _ahead(self, layer: int, segment: Segment) -> None:
        """Begin to read what comes next."""
        place = self._segments.index(segment) + 1
        if place < len(self._segments):
            self._prefetch(layer, self._segments[place])
            return
        step = len(self._seen)
        if step < len(self._order) and self._order[step - 1] == layer:
            self._prefetch(self._order[step], self._segments[0])

    def _prefetch(self, layer: int, segment: Segment) -> None:
        first = max(segment.end + self._first.get(layer, -segment.end), 0)
        if first < segment.base and self._layers[layer] is not None:
            self._next = self._fetch(layer, segment, first)

    def _fetch(self, layer: int, segment: Segment, first: int) -> _Fetch:
        groups = [group for group in segment.older if group.end > first]
        low, side = groups[0].first, 1 - self._staging.side
        pages = self._layers[layer]
        assert pages is not None
        keys, values = (
            self._staging.view(which, store, segment.end - low, side)
            for which, store in enumerate(pages.stores)
        )
        pending = []
        for which, view in enumerate((keys, values)):
            for group in groups:
                block = group.blocks[layer, which]
                part = view[group.first - low : group.end - low].view(-1).view(torch.uint8)
                pending.append(self._tiers.begin_read(block, part))
        return _Fetch(layer, segment, low, side, (keys, values), pending)

    def _settle(self, found: _Fetch | None) -> None:
        if found is not None:
            for one in found.pending:
                one.wait()
            found.pending = []

    def _drop(self) -> None:
        self._settle(self._next)
        self._next = None
