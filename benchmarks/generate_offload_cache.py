"""What others do about a KV cache beyond the device, as caches for `generate`. Part of `generate_offload.py`.

Each is a policy on our host tier, whose copies run beside the compute:

- `OffloadedCache`: a layer's keys and values leave the device as a whole when it has been updated, and the next layer's
  come back meanwhile. Every layer, in every step; what was there before is written again;
- `OffloadedStaticCache`: the same with tensors of the maximum length, which are moved and attended to in full;
- LRU: pages of `PAGE` tokens of a layer, as many on the device as the budget has beside what attention is given; the
  one that was used longest ago makes room. A page that has not changed since it was written is not written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from generation import Cache
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from hyper_parallel.compat import backend
from hyper_parallel.offloading.tiers import HostTier, Pending

PAGE = 64


def policies(config: Any, batch: int, longest: int, budget: int, host: int) -> dict[str, Cache]:
    """Of each policy, what makes a cache for one batch of `batch` requests of at most `longest` tokens. `budget`,
    `host`: bytes."""
    side = 4 * batch * config.num_key_value_heads * config.head_dim
    pages = (budget // (2 * side) - longest) // PAGE
    layers = config.num_hidden_layers
    per_layer = -(-longest // PAGE)

    @contextmanager
    def made(kind: Callable[[HostTier], _Whole | _Pages], slots: int, each: int) -> Iterator[DynamicCache]:
        with HostTier(backend(), host) as tier:
            tier.reserve(dict.fromkeys(range(slots), each))
            cache, policy = DynamicCache(config=config), kind(tier)
            cache.layers = [_Layer(policy, place) for place in range(layers)]
            yield cache
            policy.finish()

    whole = 2 * layers, side * longest
    return {
        "OffloadedCache's policy": partial(made, lambda tier: _Whole(tier, layers, None), *whole),
        "OffloadedStaticCache's policy": partial(made, lambda tier: _Whole(tier, layers, longest), *whole),
        "LRU pages": partial(
            made, lambda tier: _Pages(tier, per_layer, pages), layers * per_layer, 2 * side * PAGE
        ),
    }


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


class _Layer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, policy: Any, place: int) -> None:
        super().__init__()
        self.policy, self.place, self.tokens = policy, place, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        first, self.tokens = self.tokens, self.tokens + key_states.size(2)
        found: tuple[Tensor, Tensor] = self.policy.update(self.place, first, key_states, value_states)
        return found

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.policy.static or self.tokens + query_length, 0


class _Whole:
    """Whole layers, moved in every step."""

    def __init__(self, tier: HostTier, layers: int, static: int | None) -> None:
        self.static = static
        self._tier, self._layers = tier, layers
        self._shapes: dict[int, torch.Size] = {}
        self._here: dict[int, tuple[tuple[Tensor | None, Tensor | None], list[Pending]]] = {}
        self._leaving: list[tuple[Tensor, Pending]] = []

    def update(self, place: int, first: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Bring the layer, begin to read the next one, and write the layer."""
        if place not in self._here and place in self._shapes:
            self._read(place)
        self.finish()  # the layer before has left
        there, pending = self._here.pop(place, ((None, None), []))
        for one in pending:
            one.wait()
        following = (place + 1) % self._layers
        if following in self._shapes and following != place:
            self._read(following)
        whole = self._joined(there[0], keys, first), self._joined(there[1], values, first)
        self._shapes[place] = whole[0].shape
        for at, x in enumerate(whole):
            self._leaving.append((x, self._tier.begin_write(2 * place + at, _bytes(x))))
        return whole

    def finish(self) -> None:
        """Let writes end."""
        for _, one in self._leaving:
            one.wait()
        self._leaving = []

    def _joined(self, old: Tensor | None, new: Tensor, first: int) -> Tensor:
        if self.static is None:
            return new.contiguous() if old is None else torch.cat([old, new], 2)
        if old is None:
            old = new.new_zeros(*new.shape[:2], self.static, new.shape[3])
        old[:, :, first : first + new.size(2)] = new
        return old

    def _read(self, place: int) -> None:
        there = torch.empty(self._shapes[place]), torch.empty(self._shapes[place])
        slots = enumerate(there, 2 * place)
        self._here[place] = there, [self._tier.begin_read(slot, _bytes(x)) for slot, x in slots]


class _Pages:
    """Pages [2, B, H, PAGE, D] of layers, read when they are used."""

    static = None

    def __init__(self, tier: HostTier, per_layer: int, room: int) -> None:
        assert room > 1, "no page beside what attention is given"
        self._tier, self._per_layer, self._room = tier, per_layer, room
        self._here: OrderedDict[int, Tensor] = OrderedDict()
        self._changed: set[int] = set()

    def update(self, place: int, first: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the layer's pages, the new tokens among them."""
        end = first + keys.size(2)
        out = keys.new_empty(2, *keys.shape[:2], end, keys.shape[3])
        for index in range(-(-end // PAGE)):
            low, high = index * PAGE, min((index + 1) * PAGE, end)
            page = self._page(place * self._per_layer + index, out, low < first)
            if high > first:
                begin = max(low, first)
                for at, x in enumerate((keys, values)):
                    page[at, :, :, begin - low : high - low] = x[:, :, begin - first : high - first]
                self._changed.add(place * self._per_layer + index)
            out[:, :, :, low:high] = page[:, :, :, : high - low]
        return out[0], out[1]

    def finish(self) -> None:
        """Nothing is under way."""

    def _page(self, slot: int, like: Tensor, there: bool) -> Tensor:
        if slot in self._here:
            self._here.move_to_end(slot)
            return self._here[slot]
        if len(self._here) == self._room:
            old, page = self._here.popitem(last=False)
            if old in self._changed:
                self._tier.begin_write(old, _bytes(page)).wait()
                self._changed.remove(old)
        else:
            page = like.new_zeros(*like.shape[:3], PAGE, like.shape[4])
        if there:
            self._tier.begin_read(slot, _bytes(page)).wait()
        self._here[slot] = page
        return page
