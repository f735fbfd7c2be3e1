"""Storage of the paged KV cache: keys and values of one layer, a row for each token of each page.

Layout [pages · tokens of a page, heads, head size]: the rows of a contiguous run of pages are one view, which attention
reads without a copy; int8 pages (`int8_rows`) have scales behind the values of each head, and are unpacked into a
buffer before attention reads them. Tensors are made when a layer first writes, since only then its heads and sizes are
known; two values of one layer may have different sizes (latents of MLA and their rotary keys).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyper_parallel.inference.kv_cache.int8_rows import pack, packed_size, unpack
from hyper_parallel.inference.kv_cache.page_allocator import Run
from hyper_parallel.inference.kv_cache.sizes import LayerShape
from hyper_parallel.inference.kv_cache.staging import Staging


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
        """What it holds of a token."""
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
    """What a layer with such keys and values stores of a token."""
    keys, values = (
        (x.size(1), packed_size(x.size(3)) if int8 else x.size(3)) for x in (keys_1HTD, values_1HTD)
    )
    return LayerShape(keys, values, 1 if int8 else keys_1HTD.itemsize)


def rows_of(runs: Sequence[Run], page: int, first: int, end: int) -> list[slice]:
    """The rows of tokens `first` to `end - 1` of a request with these pages, a slice for each run."""
    found, start = [], 0
    for run in runs:
        tokens = run.count * page
        low, high = max(first - start, 0), min(end - start, tokens)
        if low < high:
            found.append(slice(run.first * page + low, run.first * page + high))
        start += tokens
    return found
