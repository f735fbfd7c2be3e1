"""`TieredCache`: a Transformers cache whose keys and values beyond a device budget lie in host memory, a pool or flash.

Layers are resident or streamed (`split` divides the budget, `layer` holds them). Each pass is planned when its
first layer is updated, before memory is taken; what was resident and does not fit any more moves to the tiers then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hyper_parallel.compat import backend
from hyper_parallel.errors import BudgetError, ConfigError, UnsupportedModelError
from hyper_parallel.inference.kv_cache.tier_slots import Moved
from hyper_parallel.inference.tiered_cache.layer import RowOrders, TieredLayer, TieredSlidingLayer, _Tiered
from hyper_parallel.inference.tiered_cache.split import LayerSize, Split, block_tokens, smallest_budget, split
from hyper_parallel.inference.tiered_cache.transfers import TierBlocks, Transfers
from hyper_parallel.offloading.open_tiers import open_tiers
from hyper_parallel.offloading.tiers import Tier
from hyper_parallel.units import format_bytes, parse_bytes


@dataclass(frozen=True)
class TieredCacheReport:
    """The bytes that a TieredCache holds and has moved."""

    device: int
    """The most bytes that it held on the device, with what attention was given."""
    budget: int | None
    streamed: int
    """Layers that are in tiers now."""
    layers: int
    tiers: dict[str, Moved]

    @property
    def idle(self) -> tuple[str, ...]:
        """Tiers that moved no byte."""
        return tuple(name for name, moved in self.tiers.items() if not moved.written)

    def __str__(self) -> str:
        budget = "no budget" if self.budget is None else f"budget {format_bytes(self.budget)}"
        lines = [
            f"device {format_bytes(self.device)} at most ({budget}), {self.streamed} of {self.layers} layers streamed"
        ]
        for name, moved in self.tiers.items():
            lines.append(
                f"{name} written {format_bytes(moved.written)} in {moved.writes} blocks, "
                f"read {format_bytes(moved.read)} in {moved.reads}"
                if moved.written
                else f"{name} moved no byte"
            )
        return "; ".join(lines)


class TieredCache(DynamicCache):  # type: ignore[misc]
    """Keys and values for `model.generate(..., past_key_values=cache)`, bit for bit those of DynamicCache.

    with TieredCache(model, device="2GiB", host="8GiB", flash="./spill") as cache:
        model.generate(input_ids, past_key_values=cache, max_new_tokens=100)
        print(cache.report)

    It is closed when it is collected, at the latest.
    """

    def __init__(
        self,
        model: Any,
        *,
        device: int | str | None = None,
        host: int | str | None = None,
        flash: str | Path | None = None,
        pool: int | str | None = None,
    ) -> None:
        """`model`: a Transformers model, or its config. `device`: bytes that the cache may hold on the device, with
        what it gives to attention; None for no limit. `host`: bytes of this process's memory, `pool`: bytes of memory
        that the processes of this job share, `flash`: a folder.

        Raises ConfigError for tiers without a budget, UnsupportedModelError for a model with state that is no keys and
        values, TierError for a tier that cannot be opened.
        """
        config = getattr(model, "config", model)
        if not hasattr(config, "get_text_config"):
            raise ConfigError(
                f"TieredCache takes a Transformers model or its config, not {type(model).__name__}"
            )
        super().__init__(config=config)
        self.budget = _bytes("device", device)
        given = {"host": _bytes("host", host), "pool": _bytes("pool", pool), "flash": flash}
        named = [name for name, one in given.items() if one is not None]
        if self.budget is None and named:
            raise ConfigError(
                f"TieredCache: {named[0]} is where keys and values go that do not fit on the device; set device to the "
                "bytes that they may take there"
            )
        self._tiers_wanted = given
        self._transfers = Transfers(TierBlocks({}))
        self._transfers.budget = self.budget
        self._orders = RowOrders()
        self._opened = self._closed = False
        self._plan: tuple[Any, ...] = ()
        self._block: int | None = None
        self._kind: torch.device | None = None
        self._crosses = bool(getattr(config, "is_encoder_decoder", False))
        self._last = -1
        if self.budget is not None:
            self.layers: list[Any] = [
                self._made(layer, place, type(config).__name__) for place, layer in enumerate(self.layers)
            ]
            _pin_shared(self.layers, config.get_text_config(decoder=True))

    def _made(self, layer: Any, place: int, name: str) -> Any:
        if type(layer) is DynamicLayer:
            return TieredLayer(self._transfers, self._orders)
        if type(layer) is DynamicSlidingWindowLayer:
            return TieredSlidingLayer(self._transfers, self._orders, layer.sliding_window)
        if type(layer).__name__ == "DummyLayer":
            return layer
        raise UnsupportedModelError(
            f"{name}: layer {place} keeps a state beside keys and values ({type(layer).__name__}), which TieredCache "
            "does not bound; leave device out, or use Transformers' DynamicCache"
        )

    # A Transformers cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Cache new keys and values of a layer [batch, heads, tokens, size]; all that its attention reads.

        Raises BudgetError where they do not fit, with the smallest budget that works, TierError where the tiers are
        full or fail.
        """
        if self._closed:
            raise ConfigError("this TieredCache is closed; make another one")
        if self.budget is None:
            found: tuple[Tensor, Tensor] = super().update(
                key_states, value_states, layer_idx, *args, **kwargs
            )
            return found
        if layer_idx >= len(self.layers):
            raise UnsupportedModelError(
                f"the model caches keys of layer {layer_idx}, and its config has {len(self.layers)} layers"
            )
        if self._crosses and layer_idx == self._last and len(self.layers) > 1:
            raise UnsupportedModelError(
                "a TieredCache holds the decoder's own keys and values; give a model with an encoder and a decoder "
                "EncoderDecoderCache(TieredCache(...), DynamicCache(config=model.config))"
            )
        self._last = layer_idx
        layer = self.layers[layer_idx]
        self._check(layer, key_states, value_states)
        layer.seen(key_states, value_states)
        new = key_states.size(2)
        tokens = max(layer.get_seq_length() + new, *(one.get_seq_length() for one in self._own()))
        self._fit(tokens, new, layer.rows)
        keys, values = layer.update(key_states, value_states)
        self._read_ahead(layer_idx)
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch becomes what row `beam_idx[i]` was (beam search)."""
        self._change_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Rows of the batch that stay, as numbers or as bool."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        self._change_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        rows = max((one.rows for one in self._own()), default=0)
        self._change_rows(torch.arange(rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: a negative number, as Transformers' own."""
        self._transfers.cancel()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Empty the cache; its tiers stay open."""
        self._transfers.finish()
        super().reset()
        self._plan, self._block = (), None

    def __deepcopy__(self, memo: Any) -> Any:
        raise ConfigError(
            "a TieredCache cannot be copied, since its tiers are its own; read the common prompt once for each cache"
        )

    # A resource.

    def close(self) -> None:
        """Give the tiers back. Calls after the first do nothing."""
        if not self._closed:
            self._closed = True
            try:
                self._transfers.finish()
            finally:
                self._transfers.blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def report(self) -> TieredCacheReport:
        """Bytes on the device and moved by each tier."""
        moved = {tier.name: tier.moved for tier in self._transfers.blocks.tiers}
        for name, one in self._tiers_wanted.items():
            if one is not None:
                moved.setdefault(name, Moved())
        streamed = sum(one.streamed for one in self._own())
        return TieredCacheReport(self._transfers.peak, self.budget, streamed, len(self.layers), moved)

    # Inside.

    def _own(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, _Tiered)]

    def _check(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ConfigError(
                "a TieredCache with a budget holds no gradients; run the model inside torch.no_grad(), as generate does"
            )
        if self._kind is None:
            self._kind = keys.device
        if keys.device != self._kind:
            raise UnsupportedModelError(
                f"a TieredCache with a budget serves one device, and the model has layers on {self._kind} and on "
                f"{keys.device}"
            )
        if layer.get_seq_length() and layer.rows != keys.size(0):
            raise ConfigError(
                f"this TieredCache holds a batch of {layer.rows} rows, and the model gave it {keys.size(0)}; call "
                "reset() between batches"
            )

    def _sizes(self, rows: int) -> list[LayerSize]:
        """Sizes of all layers; those that were never updated are taken to be like the largest that was."""
        own = self._own()
        known = [one.token_bytes(rows) for one in own]
        most = max(count for count in known if count is not None)
        return [one.size(most if count is None else count) for one, count in zip(own, known, strict=True)]

    def _fit(self, tokens: int, new: int, rows: int) -> None:
        """Plan for `tokens` and `rows`, and move what no longer fits."""
        assert self.budget is not None
        own = self._own()
        sizes = self._sizes(rows)
        plan = (tokens, new, tuple(one.token for one in sizes))
        if plan == self._plan:
            return
        now = frozenset(place for place, one in enumerate(own) if one.streamed)
        block = self._block or block_tokens(sizes, self.budget)
        largest = max((part.place.bytes for one in own for part in one.blocks), default=0)
        found = split(sizes, tokens, new, self.budget, block, now, largest)
        if found is None:
            floor = smallest_budget(sizes, tokens, new, self._block)
            raise BudgetError(
                f"TieredCache: {tokens} tokens of a batch of {rows} need device={floor} ({format_bytes(floor)}) at "
                f"least, and device is {self.budget}: attention reads a whole layer at a time, "
                f"{format_bytes(max(one.read(tokens, new) for one in sizes))} here; raise it, or generate for fewer "
                "rows at a time",
                floor=floor,
            )
        self._plan = plan
        self._spill(found, sizes, block, now)

    def _spill(self, found: Split, sizes: Sequence[LayerSize], block: int, now: frozenset[int]) -> None:
        if found.streamed and not self._opened:
            self._open()
        transfers = self._transfers
        for place in sorted(found.streamed - now):
            self._block, own = block, sizes[place].block(block)
            transfers.finish()
            assert self.budget is not None
            transfers.window = self.budget - transfers.held - own * sizes[place].token
            self._own()[place].spill(own)
        transfers.shrink(found.window)

    def _read_ahead(self, layer: int) -> None:
        """Begin to read the next streamed layer."""
        count = len(self.layers)
        for place in (*range(layer + 1, count), *range(layer + 1)):
            found = self.layers[place]
            if isinstance(found, _Tiered) and found.streamed:
                assert self._kind is not None
                self._transfers.ahead(found.needed(), self._kind)
                return

    def _change_rows(self, rows: Tensor) -> None:
        if self.budget is None:
            for layer in self.layers:
                layer.batch_select_indices(rows)
            return
        own = [one for one in self._own() if one.rows]
        if not own:
            return
        tokens = max(one.get_seq_length() for one in own)
        self._fit(tokens, 0, max(rows.numel(), own[0].rows))
        if any(one.streamed for one in own):
            used = {block.epoch for one in own for block in one.blocks} | {self._orders.epoch}
            self._orders.change(rows.tolist(), used)
        rows = rows.to(self._kind)
        for one in own:
            one.change_rows(rows)

    def _open(self) -> None:
        assert self._kind is not None
        wanted: dict[str, Any] = self._tiers_wanted
        pool = None if wanted["pool"] is None else (wanted["pool"], _job(), f"process {os.getpid()}")
        tiers: dict[str, Tier] = open_tiers(backend(self._kind.type), wanted["host"], wanted["flash"], pool)
        self._transfers.blocks = TierBlocks(tiers)
        self._opened = True


def _bytes(name: str, given: int | str | None) -> int | None:
    if given is None:
        return None
    try:
        count = parse_bytes(given) if isinstance(given, str) else int(given)
    except ValueError as error:
        raise ConfigError(f"TieredCache: {name}: {error}") from None
    if count <= 0:
        raise ConfigError(f"TieredCache: {name} is {given!r}; it is a number of bytes above 0, as in '2GiB'")
    return count


def _job() -> str:
    """A name that the processes of this job have in common, and no others."""
    port = os.environ.get("MASTER_PORT")
    if port is None:
        return f"cache-{os.getpid()}"
    return f"cache-{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{port}"


def _pin_shared(layers: Sequence[Any], config: Any) -> None:
    """Layers whose keys and values later layers read, too, stay on the device: the model holds them through a pass."""
    for layer, mode in zip(layers, getattr(config, "kv_sharing_modes", None) or (), strict=False):
        if mode == "store" and isinstance(layer, _Tiered):
            layer.pinned = True
