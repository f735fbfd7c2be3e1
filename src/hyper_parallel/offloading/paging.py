"""Paging: tensors of code that no graph covers, on demand; parameters that modules borrow for a forward pass.

Modules borrow for what happens between the steps of a graph: an evaluation, a sample of text. Buffers are few bytes,
and a module may read those of another (a router's bias, where the layer adds it), so that all are there meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from hyper_parallel.compat.dispatch import (
    TorchDispatchMode,
    flatten,
    leaves_of,
    mutated_arguments,
    outside_modes,
)
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import TierError
from hyper_parallel.graph import StepGraph, Value, values_of
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.offloading.runtime import whole
from hyper_parallel.offloading.tiers import Tier
from hyper_parallel.units import format_bytes


def lend(model: nn.Module) -> None:
    """From now on the forward pass of each module of the model borrows the parameters that are its own, and that of
    the model itself every buffer."""
    for module in model.modules():
        if module._parameters or module is model:
            open_: list[contextlib.ExitStack] = []
            module.register_forward_pre_hook(_Begin(open_, buffers=module is model))
            module.register_forward_hook(_End(open_), always_call=True)


class _Begin:
    def __init__(self, open_: list[contextlib.ExitStack], buffers: bool) -> None:
        self._open, self._buffers = open_, buffers

    def __call__(self, module: nn.Module, args: Any) -> None:
        stack = contextlib.ExitStack()
        buffers = module.buffers() if self._buffers else ()
        stack.enter_context(present(*module._parameters.values(), *buffers))
        self._open.append(stack)


class _End:
    def __init__(self, open_: list[contextlib.ExitStack]) -> None:
        self._open = open_

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().close()


# Demand paging (LRU) of tensors for code that no graph covers.
#
# Before each operator the pager fetches its arguments, and evicts the least recently used storages until there is room
# for them and for the operator's results:
#
#     resident + bytes(arguments that are away) + bytes(results) ≤ room
#
# The size of the results is known from the same call in a captured graph or from an equal earlier call. Where it is
# unknown, everything but the arguments is evicted. So the code runs within the working set of its largest operator,
# which any plan of the same operators needs at least. Kernels, their order and their values do not change.
#
# A storage that was not written to since it last left leaves without a copy.


class NoRoomError(TierError):
    """The tiers do not hold what must leave."""


@dataclass
class _Page:
    """One storage."""

    bytes: int
    there: bool = True
    clean: bool = False
    """What lies in its slot is what it holds."""
    slot: tuple[str, int] | None = None


class Paged(TorchDispatchMode):
    """Inside, at most `room` bytes of what operators make, and of what was `given`, are on the device at once."""

    def __init__(
        self, tiers: Mapping[str, Tier], room: int, device: torch.device, step: StepGraph | None = None
    ) -> None:
        """`tiers`: with nothing in them that is still needed. `step`: calls of the code, with their results' sizes."""
        super().__init__()
        self._room, self._device = room, device
        self._slots = {name: _Slots(tier) for name, tier in tiers.items()}
        self._pages: OrderedDict[int, _Page] = OrderedDict()
        """What was used last is last."""
        self._storages: dict[int, Any] = {}
        """Weak references, by the keys of the pages."""
        self._fixed: set[int] = set()
        self._made: dict[Hashable, int] = {} if step is None else dict(_calls(step))
        self._resident = 0
        self.peak = 0
        """Bytes that were resident at most."""

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Tensors from outside that may leave too."""
        for tensor in tensors:
            self._add(tensor)

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Tensors from outside that may not leave, and do not count."""
        self._fixed.update(id(tensor.untyped_storage()) for tensor in tensors)
        self._kept = list(tensors)

    def restore(self) -> None:
        """Bring back for good what somebody still holds."""
        for key in list(self._pages):
            if key in self._pages:
                with outside_modes():
                    self._bring([key], 0)
                self._fixed.add(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        keys = list(dict.fromkeys(self._add(tensor) for tensor in given))
        call = _call(func, args, kwargs)
        with outside_modes():
            self._bring(keys, self._made.get(call) if call is not None else None)
        before = self._resident
        result = func(*args, **kwargs)
        for tensor in leaves_of(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        for tensor in mutated_arguments(func, args, kwargs):
            self._changed(tensor)
        self.peak = max(self.peak, self._resident)
        if call is not None:
            self._made[call] = max(self._made.get(call, 0), self._resident - before)
        return result

    def _add(self, tensor: Tensor) -> int:
        """The key of a tensor's storage, which has a page from now on."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._pages or key in self._fixed or tensor.device != self._device:
            return key
        if not storage.resizable():
            return key
        self._pages[key] = page = _Page(storage.nbytes())
        self._storages[key] = weakref.ref(storage, self._gone_of(key))
        self._resident += page.bytes
        return key

    def _gone_of(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._gone(key)

    def _gone(self, key: int) -> None:
        page = self._pages.pop(key)
        del self._storages[key]
        if page.there:
            self._resident -= page.bytes
        if page.slot is not None:
            name, number = page.slot
            self._slots[name].free(number)

    def _changed(self, tensor: Tensor) -> None:
        key = id(tensor.untyped_storage())
        page = self._pages.get(key)
        if page is not None:
            count = tensor.untyped_storage().nbytes()
            self._resident += count - page.bytes
            page.bytes, page.clean = count, False

    def _bring(self, keys: Sequence[int], fresh: int | None) -> None:
        """Fetch these storages and make room for `fresh` bytes of results; None: unknown, so evict all others."""
        keys = [key for key in keys if key in self._pages]
        for key in keys:
            self._pages.move_to_end(key)
        missing = sum(self._pages[key].bytes for key in keys if not self._pages[key].there)
        kept = self._fixed.union(keys)
        for key in list(self._pages):
            if fresh is not None and self._resident + missing + fresh <= self._room:
                break
            page = self._pages.get(key)
            if page is not None and page.there and key not in kept:
                self._send(key)
        for key in keys:
            if not self._pages[key].there:
                self._fetch(key, self._pages[key])
        self.peak = max(self.peak, self._resident)

    def _send(self, key: int) -> None:
        page, storage = self._pages[key], self._storages[key]()
        if not page.bytes or not storage.resizable():  # NumPy, for example, may have a view of it by now
            return
        if not page.clean or page.slot is None:
            if page.slot is None:
                page.slot = self._slot(page.bytes)
            name, number = page.slot
            self._slots[name].tier.begin_write(number, _whole(storage, self._device)).wait()
            page.clean = True
        storage.resize_(0)
        page.there = False
        self._resident -= page.bytes

    def _fetch(self, key: int, page: _Page) -> None:
        storage = self._storages[key]()
        storage.resize_(page.bytes)
        assert page.slot is not None
        name, number = page.slot
        self._slots[name].tier.begin_read(number, _whole(storage, self._device)).wait()
        page.there = True
        self._resident += page.bytes

    def _slot(self, count: int) -> tuple[str, int]:
        for name, slots in self._slots.items():
            number = slots.take(count)
            if number is not None:
                return name, number
        held = ", ".join(f"{name} {format_bytes(slots.tier.capacity)}" for name, slots in self._slots.items())
        raise NoRoomError(f"what leaves the device does not fit into the memory beside it ({held})")


class _Slots:
    """The slots of one tier, by their sizes; several of a size are reserved at once, since layers are alike."""

    def __init__(self, tier: Tier) -> None:
        tier.reserve({})
        self.tier = tier
        self._sizes: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._numbers = itertools.count()

    def take(self, count: int) -> int | None:
        """Reserve a slot of `count` bytes; None where the tier is full."""
        if not self._free[count]:
            there = sum(size == count for size in self._sizes.values())
            if not (self._grow(count, max(there, 1)) or self._grow(count, 1)):
                self._pack()
                if not self._grow(count, 1):
                    return None
        return self._free[count].pop()

    def free(self, number: int) -> None:
        """Nothing in a slot is needed any more."""
        self._free[self._sizes[number]].append(number)

    def _grow(self, count: int, times: int) -> bool:
        aligned = -(-count // self.tier.align) * self.tier.align
        if self._end + times * aligned > self.tier.capacity:
            return False
        for _ in range(times):
            number = next(self._numbers)
            self._sizes[number], self._offsets[number] = count, self._end
            self._free[count].append(number)
            self._end += aligned
        self.tier.reserve(self._sizes, self._offsets)
        return True

    def _pack(self) -> None:
        """Only what is in use stays, side by side."""
        unused = {number for numbers in self._free.values() for number in numbers}
        self._free.clear()
        self._end = 0
        self._sizes = {number: size for number, size in self._sizes.items() if number not in unused}
        self._offsets = {}
        for number, size in self._sizes.items():
            self._offsets[number] = self._end
            self._end += -(-size // self.tier.align) * self.tier.align
        self.tier.reserve(self._sizes, self._offsets)


def _whole(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return whole(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))  # type: ignore[call-overload]


def _call(func: Any, args: Any, kwargs: Any) -> Hashable | None:
    """Equal for calls whose results have equal sizes; None where that is not known."""
    leaves, shape = flatten((tuple(args), dict(kwargs)))
    call = (func, shape, tuple(_described(leaf) for leaf in leaves))
    try:
        hash(call)
    except TypeError:
        return None
    return call


def _described(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, fx.Node):
        value = leaf.meta.get("value")
        return (tuple(value.shape), value.dtype) if isinstance(value, Value) else None
    return leaf  # type: ignore[no-any-return]


def _calls(step: StepGraph) -> Iterable[tuple[Hashable, int]]:
    """The bytes that each of a graph's calls makes."""
    known: set[int] = {value.storage for node in step.placeholders for value in values_of(node)}
    for node in step.nodes:
        fresh = {value.storage for value in values_of(node)} - known - touched(node)
        known |= fresh
        if node.op == "call_function" and node.target is not None:
            call = _call(node.target, node.args, node.kwargs)
            if call is not None:
                yield call, sum(step.storages[storage].bytes for storage in fresh)
