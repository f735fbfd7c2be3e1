"""Storage of the paged KV cache: keys and values of one layer, a row for each token of each page.

Layout [pages · tokens of a page, heads, head size]: the rows of a contiguous run of pages are one view, which attention
reads without a copy. Tensors are made when a layer first writes, since only then its heads and sizes are known; two
values of one layer may have different sizes (latents of MLA and their rotary keys).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyper_parallel.inference.kv_cache.page_allocator import Run
from hyper_parallel.inference.kv_cache.sizes import LayerShape
from hyper_parallel.inference.kv_cache.staging import Staging


class LayerPages:
    """Keys and values of one layer."""

    def __init__(
        self, pages: int, page: int, staging: Staging, keys_1HTD: Tensor, values_1HTD: Tensor
    ) -> None:
        """For values like `keys_1HTD` and `values_1HTD`, of any number of tokens."""
        self.page = page
        self.staging = staging
        self.stores = [
            torch.empty(pages * page, x.size(1), x.size(3), dtype=x.dtype, device=x.device)
            for x in (keys_1HTD, values_1HTD)
        ]
        """Of keys and of values, [rows, H, D]."""
        keys, values = (store.transpose(0, 1).unsqueeze(0) for store in self.stores)
        self.rows = (keys, values)
        """The same as attention reads them, [1, H, rows, D]."""

    def write(self, rows: Tensor, keys_1HTD: Tensor, values_1HTD: Tensor) -> None:
        """Write token t of the first `len(rows)` to row `rows[t]`."""
        for store, x in zip(self.stores, (keys_1HTD, values_1HTD), strict=True):
            store.index_copy_(0, rows, x[0, :, : len(rows)].transpose(0, 1))

    @property
    def shape(self) -> LayerShape:
        """What it holds of a token."""
        (_, *keys), (_, *values) = (store.shape for store in self.stores)
        return LayerShape((keys[0], keys[1]), (values[0], values[1]), self.stores[0].itemsize)

    def read(self, rows: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, S, D] of some rows. Views, or of several slices copies in the staging buffers, which
        the next such call of any layer overwrites."""
        if len(rows) == 1:
            parts = [store[rows[0]] for store in self.stores]
        else:
            count = sum(one.stop - one.start for one in rows)
            parts = []
            for which, store in enumerate(self.stores):
                parts.append(self.staging.view(which, store, count))
                torch.cat([store[one] for one in rows], out=parts[-1])
        return parts[0].transpose(0, 1).unsqueeze(0), parts[1].transpose(0, 1).unsqueeze(0)


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
