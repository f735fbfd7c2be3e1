"""What autograd saves, kept in another memory, as others do it; and a link whose bandwidth is emulated.

Part of `offload_real.py`. `torch.autograd.graph.save_on_cpu` moves nothing away on a processor, where its copies lie
in the same memory. So what is saved goes to the slots of a tier, whose memory is not counted.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.offloading.runtime import whole
from hyper_parallel.offloading.tiers import Pending, Tier

_SMALL = 1024
"""Bytes below which nothing is offloaded, which is torchtune's limit."""


class Emulated:
    """A `Tier` behind a link with a bandwidth of its own, one way out and one back, first in, first out."""

    def __init__(self, tier: Tier, bandwidth: float) -> None:
        self._tier, self._bandwidth = tier, bandwidth
        self._free = {"out": 0.0, "back": 0.0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)  # all but copies

    def begin_write(self, slot: int, x: Tensor) -> Pending:
        return self._late("out", self._tier.begin_write(slot, x), x.numel())

    def begin_read(self, slot: int, x: Tensor) -> Pending:
        return self._late("back", self._tier.begin_read(slot, x), x.numel())

    def _late(self, way: str, pending: Pending, count: int) -> Pending:
        begins = max(time.perf_counter(), self._free[way])
        self._free[way] = begins + count / self._bandwidth
        return _Late(pending, self._free[way])


@dataclass(frozen=True)
class _Late:
    """A copy that is over no sooner than the link allows."""

    pending: Pending
    until: float

    def wait(self) -> float:
        begun = time.perf_counter()
        self.pending.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))
        return time.perf_counter() - begun

    def done(self) -> bool:
        return self.pending.done() and time.perf_counter() >= self.until

    @property
    def seconds(self) -> float | None:
        return None


class SavedElsewhere:
    """What autograd saves goes to slots of a tier and comes back: `torch.autograd.graph.save_on_cpu`, into an arena.

    `ahead`: copies run beside the computation, a layer's out while the next one computes, and back while the one before
    it does; what the last layer and the loss saved stays. In favour of it a storage that is saved several times goes
    once, and parameters stay. Slots are given out anew in each step, which must save the same.
    """

    def __init__(
        self, tier: Tier, layers: Sequence[nn.Module], resident: Sequence[Tensor], ahead: bool
    ) -> None:
        self._tier, self._ahead = tier, ahead
        self._resident = {tensor.untyped_storage().data_ptr() for tensor in resident}
        self._sizes: dict[int, int] = {}
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index))
        self._last = len(layers) - 1
        self._begin()

    def step(self, run: Callable[[], float]) -> float:
        """A step with these hooks; the first one only counts what is saved."""
        counting = not self._sizes
        self._counting = counting
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            loss = run()
        if counting:
            self._tier.reserve(self._sizes)
        self._begin()
        return loss

    def _begin(self) -> None:
        self._slots: dict[int, tuple[int, Any]] = {}
        """Of a storage that is alive its identity, to its slot and a reference that sees it die."""
        self._layer = -1
        self._of: dict[int, list[int]] = defaultdict(list)
        """Layer to the slots of what it saved."""
        self._where: dict[int, int] = {}
        self._left: dict[int, int] = defaultdict(int)
        """Slot to how often it is still asked for."""
        self._out: dict[int, tuple[Pending, Tensor]] = {}
        self._back: dict[int, tuple[Pending, Tensor]] = {}
        self._here: dict[int, Tensor] = {}

    def _enter(self, layer: int) -> None:
        """Before a layer's forward pass: what is two layers behind has left."""
        self._layer = layer
        for slot in [slot for slot in self._out if self._where[slot] <= layer - 2]:
            self._out.pop(slot)[0].wait()

    def _pack(self, x: Tensor) -> Any:
        storage = x.untyped_storage()
        stays = self._ahead and self._layer == self._last
        if stays or storage.data_ptr() in self._resident or storage.nbytes() < _SMALL:
            return x
        key = id(storage)
        if key not in self._slots:
            slots = self._slots
            slots[key] = len(self._where), weakref.ref(storage, lambda _: slots.pop(key, None))
            self._leave(slots[key][0], x)
        slot, _ = self._slots[key]
        self._left[slot] += 1
        about = slot, x.dtype, x.size(), x.stride(), x.storage_offset()
        return (*about, x if self._counting else None)

    def _leave(self, slot: int, x: Tensor) -> None:
        self._where[slot] = self._layer
        self._of[self._layer].append(slot)
        if self._counting:
            self._sizes[slot] = x.untyped_storage().nbytes()
            return
        pending = self._tier.begin_write(slot, whole(x))
        if self._ahead:
            self._out[slot] = pending, whole(x)
        else:
            pending.wait()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        slot, dtype, size, stride, offset, x = packed
        if x is not None:
            return x
        if self._ahead:
            for layer in (self._where[slot], self._where[slot] - 1):
                self._fetch(self._of.pop(layer, []))
        elif slot not in self._here:
            self._fetch([slot])
        if slot in self._back:
            pending, self._here[slot] = self._back.pop(slot)
            pending.wait()
        found = torch.empty(0, dtype=dtype).set_(self._here[slot].untyped_storage(), offset, size, stride)
        self._left[slot] -= 1
        if self._left[slot] == 0:
            del self._here[slot]
        return found

    def _fetch(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._out:
                self._out.pop(slot)[0].wait()
            fresh = torch.empty(self._sizes[slot], dtype=torch.uint8)
            self._back[slot] = self._tier.begin_read(slot, fresh), fresh
