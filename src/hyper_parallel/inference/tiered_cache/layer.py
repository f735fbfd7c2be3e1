"""One layer of a tiered KV cache: resident, as Transformers holds it, or streamed from blocks in tiers.

A streamed layer has whole blocks of tokens in tiers, and its newest tokens, the tail, on the device. `update` puts them
together in a new tensor [batch, heads, tokens, size], contiguous as `DynamicCache` gives it. Blocks are written once:
beam search, which permutes the rows of the batch, changes only which row of a block is read (`RowOrders`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.tiered_cache.split import LayerSize
from hyper_parallel.inference.tiered_cache.transfers import Block, Transfers


class RowOrders:
    """The row of the batch that each row of a block is now, by the epoch in which it was written; None: the same."""

    def __init__(self) -> None:
        self.epoch = 0
        self._orders: dict[int, list[int] | None] = {0: None}

    def of(self, block: Block) -> list[int] | None:
        """Rows of the block, in the order of the batch."""
        return self._orders[block.epoch]

    def change(self, rows: Sequence[int], used: set[int]) -> None:
        """Row i of the batch is what row `rows[i]` was. `used`: epochs of blocks that exist."""
        self._orders = {
            epoch: list(rows) if order is None else [order[row] for row in rows]
            for epoch, order in self._orders.items()
            if epoch in used
        }
        self.epoch += 1
        self._orders[self.epoch] = None


@dataclass(frozen=True)
class _Kind:
    """Keys and values of one token of one row."""

    heads: tuple[int, int]
    sizes: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    device: torch.device

    def bytes(self, which: int) -> int:
        return self.heads[which] * self.sizes[which] * self.dtypes[which].itemsize

    def views(self, blocks: Tensor, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks, rows, heads, tokens, size] in uint8 [blocks, n]."""
        border = rows * tokens * self.bytes(0)
        keys, values = (
            part.view(self.dtypes[which]).unflatten(1, (rows, self.heads[which], tokens, self.sizes[which]))
            for which, part in enumerate((blocks[:, :border], blocks[:, border:]))
        )
        return keys, values

    def empty(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        keys, values = (
            torch.empty(
                rows,
                self.heads[which],
                tokens,
                self.sizes[which],
                dtype=self.dtypes[which],
                device=self.device,
            )
            for which in range(2)
        )
        return keys, values


class _Tiered:
    """Base of full and sliding layers; `_window`: tokens that attention reads before the newest ones."""

    is_croppable = True
    is_compileable = False
    _window: int | None = None
    record_past = False

    def __init__(self, transfers: Transfers, orders: RowOrders, *args: Any) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._streamed = False
        super().__init__(*args)
        self.transfers, self.orders = transfers, orders
        self.pinned = False
        self.rows = 0
        self.blocks: list[Block] = []
        self._kind: _Kind | None = None
        self._clear()

    def _clear(self) -> None:
        self._streamed = False
        self._start = self._end = self._tail_first = 0
        self._tail: Tensor | None = None
        self._block = 0
        self._held = 0

    # What Transformers' code reads.

    @property
    def keys(self) -> Tensor | None:
        """Keys of a resident layer. Raises UnsupportedModelError for a streamed one, whose keys are in no tensor."""
        return self._whole(self._keys)

    @keys.setter
    def keys(self, given: Tensor | None) -> None:
        self._keys = given

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self._whole(self._values)

    @values.setter
    def values(self, given: Tensor | None) -> None:
        self._values = given

    def _whole(self, found: Tensor | None) -> Tensor | None:
        if self._streamed:
            raise UnsupportedModelError(
                "a TieredCache has keys and values of this layer in its tiers, and the model reads them without "
                "Cache.update; use a DynamicCache for what attention reads like this (of an encoder and decoder: the "
                "cross-attention's)"
            )
        return found

    def get_seq_length(self) -> int:
        """Tokens that were cached."""
        found: int = self._end if self._streamed else super().get_seq_length()  # type: ignore[misc]
        return found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and first position of what `update` returns for this number of new tokens."""
        if not self._streamed:
            found: tuple[int, int] = super().get_mask_sizes(query_length)  # type: ignore[misc]
            return found
        first = self._first_read()
        return self._end - first + query_length, first

    def _first_read(self) -> int:
        return 0 if self._window is None else max(0, self._end - self._window)

    # Sizes.

    def seen(self, keys: Tensor, values: Tensor) -> None:
        """Note the shape of the layer's keys and values [rows, heads, tokens, size]."""
        self.rows = keys.size(0)
        if self._kind is None:
            self._kind = _Kind(
                (keys.size(1), values.size(1)),
                (keys.size(3), values.size(3)),
                (keys.dtype, values.dtype),
                keys.device,
            )

    def token_bytes(self, rows: int) -> int | None:
        """Bytes of one token of a batch of `rows` rows; None before the first."""
        return None if self._kind is None else rows * (self._kind.bytes(0) + self._kind.bytes(1))

    def size(self, token: int) -> LayerSize:
        """For the split of the budget."""
        return LayerSize(token, self._window, self.pinned)

    def _account(self) -> None:
        held = 0 if self._tail is None else self._tail.numel()
        if self._keys is not None and self._values is not None:
            held += self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes()
        self.transfers.hold(held - self._held)
        self._held = held

    # Update.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Cache them, and return all that attention reads, contiguous."""
        if not self._streamed:
            return self._update_resident(key_states, value_states)
        kind, first = self._known, self._first_read()
        old, new = self._end - first, key_states.size(2)
        keys, values = kind.empty(self.rows, old + new)
        self.transfers.give((keys, values))
        blocks = [block for block in self.blocks if block.end > first]
        copy = functools.partial(self._copy_blocks, keys, values, first)
        self.transfers.read(blocks, kind.device, copy)
        self._copy_tail(keys, values, first)
        keys[:, :, old:], values[:, :, old:] = key_states, value_states
        self._append(key_states, value_states)
        if not self.record_past:
            self._forget()
        return keys, values

    def _update_resident(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        before = self._held
        keys, values = super().update(key_states, value_states)  # type: ignore[misc]
        own = self._keys is not None and self._keys.untyped_storage() is keys.untyped_storage()
        self._account()
        self.transfers.peaked(max(before, 0 if own else keys.nbytes + values.nbytes))
        return keys, values

    def _copy_blocks(
        self, keys: Tensor, values: Tensor, first: int, blocks: Sequence[Block], buffer: Tensor
    ) -> None:
        """Tokens of blocks that follow one another, from `first` on, to their place in tensors that begin with token
        `first`. `buffer`: uint8 [blocks, n]."""
        one, order = blocks[0], self.orders.of(blocks[0])
        skipped, end = max(0, first - one.first), min(blocks[-1].end, self._end)
        whole = skipped == 0 and end == blocks[-1].end
        if not whole and len(blocks) > 1:
            for block, part in zip(blocks, buffer, strict=True):
                self._copy_blocks(keys, values, first, [block], part[None])
            return
        at = one.first + skipped - first
        views = self._known.views(buffer, one.rows, one.count)
        for target, found in zip((keys, values), views, strict=True):
            found = found[:, :, :, skipped : end - blocks[-1].first]
            there = target[:, :, at : at + end - one.first - skipped].unflatten(2, (len(blocks), -1))
            if order is None:
                there.copy_(found.permute(1, 2, 0, 3, 4))
            else:
                for row, source in enumerate(order):
                    there[row].copy_(found[:, source].transpose(0, 1))

    def _copy_tail(self, keys: Tensor, values: Tensor, first: int) -> None:
        skipped = max(0, first - self._tail_first)
        count = self._end - self._tail_first
        if self._tail is None or skipped >= count:
            return
        at = self._tail_first + skipped - first
        for target, part in zip((keys, values), self._tail_views(), strict=True):
            target[:, :, at : at + count - skipped] = part[:, :, skipped:count]

    def _append(self, keys: Tensor, values: Tensor) -> None:
        done, new = 0, keys.size(2)
        while done < new:
            if self._tail is None:
                size = self.token_bytes(self.rows)
                assert size is not None
                self._tail = torch.empty(size * self._block, dtype=torch.uint8, device=self._known.device)
                self._account()
            at = self._end - self._tail_first
            count = min(self._block - at, new - done)
            for target, part in zip(self._tail_views(), (keys, values), strict=True):
                target[:, :, at : at + count] = part[:, :, done : done + count]
            done, self._end = done + count, self._end + count
            if at + count == self._block:
                self._write_tail()

    def _write_tail(self) -> None:
        tail, self._tail = self._tail, None
        assert tail is not None
        self._account()
        place = self.transfers.write(tail)
        self.blocks.append(Block(place, self._tail_first, self._block, self.rows, self.orders.epoch))
        self._tail_first = self._end

    def _forget(self) -> None:
        """Free the blocks before the window."""
        first = self._first_read()
        while self.blocks and self.blocks[0].end <= first:
            self.blocks.pop(0).place.free()

    def needed(self) -> list[Block]:
        """Blocks that the next update reads."""
        first = self._first_read()
        return [block for block in self.blocks if block.end > first]

    @property
    def _known(self) -> _Kind:
        assert self._kind is not None, "a layer that was never updated"
        return self._kind

    def _tail_views(self) -> tuple[Tensor, Tensor]:
        assert self._tail is not None
        keys, values = self._known.views(self._tail[None], self.rows, self._block)
        return keys[0], values[0]

    # Residence.

    @property
    def streamed(self) -> bool:
        """Whether it lies in tiers."""
        return self._streamed

    def spill(self, block: int) -> None:
        """Move to the tiers, in blocks of this number of tokens."""
        length = self.get_seq_length()
        keys, values = self._keys, self._values
        self._streamed, self._block = True, block
        if keys is None or values is None or not length:
            self._end = self._tail_first = 0
        else:
            self._end = self._tail_first = length - keys.size(2)
            self._append(keys, values)
        self._keys = self._values = None
        self._account()
        self.is_initialized = True

    # Changes of the batch and of the length.

    def change_rows(self, rows: Tensor) -> None:
        """Row i is from now on what row `rows[i]` was."""
        if not self._streamed:
            if self._keys is not None and self._values is not None and self.get_seq_length() > 0:
                before = self._held
                self._keys, self._values = self._keys[rows], self._values[rows]
                self._account()
                self.transfers.peaked(before)
        elif self._tail is not None:
            self._change_tail(rows)
        self.rows = rows.numel()

    def _change_tail(self, rows: Tensor) -> None:
        """Only the tokens that are there are copied, so that little more is held meanwhile."""
        count = self._end - self._tail_first
        parts = [part[:, :, :count][rows] for part in self._tail_views()]
        size = self.token_bytes(rows.numel())
        assert size is not None
        self._tail, self.rows = None, rows.numel()
        self._tail = torch.empty(size * self._block, dtype=torch.uint8, device=self._known.device)
        for target, part in zip(self._tail_views(), parts, strict=True):
            target[:, :, :count] = part
        self._account()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; a negative number, as Transformers' own."""
        if not self._streamed:
            super().crop(tokens_to_remove)  # type: ignore[misc]
            self._account()
            return
        if tokens_to_remove > 0:
            raise ValueError(f"crop is given a negative number of tokens to remove, not {tokens_to_remove}")
        end = max(0, self._end + tokens_to_remove)
        there = self.blocks[0].first if self.blocks else self._tail_first
        if tokens_to_remove and self._window is not None and max(0, end - self._window) < there:
            raise RuntimeError(
                "crop: the tokens of the sliding window before the ones to be removed are gone; call "
                "activate_past_recording first"
            )
        if end < self._tail_first:
            self.transfers.finish()
            self._tail, self._end = None, end
            self._account()
            while self.blocks and self.blocks[-1].first >= end:
                self.blocks.pop().place.free()
            self._tail_first = end
            if self.blocks and self.blocks[-1].end > end:
                self._take_back(self.blocks.pop())
        self._end = end
        self._forget()

    def _take_back(self, block: Block) -> None:
        """The beginning of a block becomes the tail."""
        count = self._end - block.first
        keys, values = self._known.empty(self.rows, count)
        copy = functools.partial(self._copy_blocks, keys, values, block.first)
        self.transfers.read([block], self._known.device, copy)
        block.place.free()
        self._tail_first = self._end = block.first
        self._append(keys, values)

    def reset(self) -> None:
        """Empty, and resident again."""
        for block in self.blocks:
            block.place.free()
        self.blocks.clear()
        self._keys = self._values = self._tail = None
        self._account()
        self._clear()
        self.is_initialized = False
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = 0


class TieredLayer(_Tiered, DynamicLayer):  # type: ignore[misc]
    """A layer whose attention reads all tokens."""


class TieredSlidingLayer(_Tiered, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer whose attention reads a window of tokens, or a chunk."""

    def __init__(self, transfers: Transfers, orders: RowOrders, sliding_window: int) -> None:
        super().__init__(transfers, orders, sliding_window)
        self._window = sliding_window - 1

    def _update_resident(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super()._update_resident(key_states, value_states)
        if key_states.size(2) > 1 and self._keys is not None and self._values is not None:
            # A view of the window would hold all that was read.
            self._keys, self._values = self._keys.clone(), self._values.clone()
            self._account()
            self.transfers.give((keys, values))
        return keys, values
