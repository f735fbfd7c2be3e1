"""Memory needs of requests: a pass's measured workspace, the smallest budget, and the best plan for a batch size."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.compat.dispatch import TorchDispatchMode, leaves_of
from hyper_parallel.config.inference import Inference, Sampling
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.kv_cache.sizes import (
    LEAST,
    KVCacheSizes,
    KVChoice,
    KVDemand,
    LayerShape,
    kv_choices,
)
from hyper_parallel.inference.memory_plan import MemoryPlan, Sizes, make_plan, smallest
from hyper_parallel.inference.ragged_pass import Segment
from hyper_parallel.inference.request import Request, Running
from hyper_parallel.inference.run_allocator import Run
from hyper_parallel.units import format_bytes


class Needs:
    """The memory that some requests need on one model. `room`: bytes of tiers for the KV cache, by name, the fastest
    first."""

    def __init__(
        self,
        sizes: Sizes,
        shapes: Sequence[LayerShape],
        page: int,
        requests: Sequence[Request],
        settings: Inference,
        room: Mapping[str, int],
        *,
        stored: int | None = None,
        pinned: int = 0,
    ) -> None:
        """`page`: tokens of a page; `stored`: those that this process stores, by default all. `pinned`: pages of
        prompts that stay on the device."""
        self.settings, self.pinned = settings, pinned
        self.extent = Extent.of(requests)
        self._sizes, self._page, self._stored = sizes, page, page if stored is None else stored
        self._weights = smallest(sizes, pages=0, workspace=0)
        self._demand = KVDemand(
            shapes=tuple(shapes),
            page=self._stored,
            pages=tuple(sorted((one.pages(page) for one in requests), reverse=True)),
            room=room,
            device=settings.pages,
            pinned=pinned,
        )

    def floor(self, count: int, workspace: int) -> int:
        """The smallest budget for `count` requests at once; more than any where they need more pages than were set."""
        least = min(map(self._bytes, self._choices(count)), default=sys.maxsize)
        return self._weights + workspace + least

    def plan(self, budget: int, count: int, workspace: int) -> MemoryPlan | None:
        """The best plan for `count` requests at once."""
        found = [
            replace(plan, cache=choice)
            for choice in self._choices(count)
            if (
                plan := make_plan(
                    self._sizes,
                    budget,
                    requests=count,
                    pages=choice.sizes.device,
                    workspace=workspace,
                    staging=self._bytes(choice) - choice.sizes.device * self._sizes.page,
                )
            )
            is not None
        ]
        # Of equal costs, tiers, in which prefixes outlive a run, and large transfers.
        return min(
            found,
            key=lambda plan: (plan.cost, not plan.cache.tiered, -plan.cache.sizes.block),
            default=None,
        )

    def terms(self, workspace: int) -> str:
        """The terms of the smallest budget for one request at once, each with what would lower it."""
        least = min(self._choices(1), key=self._bytes)
        pinned = self.pinned * self._demand.bytes
        cache = self._bytes(least) - pinned
        cached = "inference.pages" if self.settings.pages else "inference.max_tokens, or shorten the prompts"
        passed = "inference.page" if self._page > 16 else "the length of the prompts"
        where = ", the rest of which is in tiers" if least.read else ""
        stay = f", {format_bytes(pinned)} of pinned prompts (pin less)" if pinned else ""
        return (
            f"{format_bytes(self._weights)} of weights, {format_bytes(cache)} of keys and values for the longest "
            f"request{where} (lower {cached}){stay} and {format_bytes(workspace)} of a pass (lower {passed})"
        )

    def _choices(self, count: int) -> Iterator[KVChoice]:
        return kv_choices(self._demand, count)

    def _bytes(self, choice: KVChoice) -> int:
        """On the device."""
        return choice.sizes.device_bytes(self._demand.shapes, self._stored)


# Workspace of a pass, measured: the bytes that the largest passes hold beside weights and KV cache.
#
# Two passes are the largest: one of pieces of prompts at the end of the longest prompt (masks, activations of most
# rows), and one of the newest tokens of b requests at the end of the longest answers (logits, contexts). Both are run
# with made-up tokens on the model itself, every request reading the same scattered pages, the widest spread of tokens
# over experts, and a draw with every filter that a request has; a counter of live storages takes the peak. What is
# measured for b requests bounds what any pass of at most b of these requests holds, and grows at most in proportion to
# b.


@dataclass(frozen=True)
class Extent:
    """The largest of some requests. `context`: tokens that one caches at most."""

    prompt: int
    context: int
    sampling: Sampling

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Extent:
        """The extent of all of them together."""
        given = [one.sampling for one in requests]
        drawn = any(one.temperature for one in given)
        sampling = Sampling(
            max_tokens=2,
            temperature=1.0 if drawn else 0.0,
            top_k=1 if any(one.top_k for one in given) else None,
            top_p=0.5 if any(one.top_p for one in given) else None,
            repetition_penalty=2.0 if any(one.repetition_penalty != 1 for one in given) else 1.0,
            logprobs=any(one.logprobs for one in given),
        )
        return cls(
            max(len(one.ids) for one in requests),
            max(len(one.ids) + one.sampling.max_tokens - 1 for one in requests),
            sampling,
        )

    def within(self, other: Extent) -> bool:
        """Whether what is measured for `other` holds for these."""
        return (
            self.sampling == other.sampling and self.prompt <= other.prompt and self.context <= other.context
        )


def measure(engine: Engine, known: Sequence[Tensor], count: int, extent: Extent, settings: Inference) -> int:
    """Bytes that a pass of at most `count` requests holds. `known`: tensors that are counted elsewhere, as is the KV
    cache."""
    pages = -(-extent.context // engine.page)
    # A few pages again and again: where contexts lie in tiers, the device has no room for a whole one.
    there = min(pages, LEAST)
    scattered = tuple(Run(place % there, 1) for place in reversed(range(pages)))
    sizes = KVCacheSizes(device=there, staging=pages * engine.cache.stored)
    piece = min(engine.page, extent.prompt)
    pieces = _pass(engine, [piece] * count, extent.prompt, extent, settings.rows, scattered)
    newest = _pass(engine, [1] * count, extent.context, extent, settings.rows, scattered)
    return max(_peak(engine, known, sizes, chosen) for chosen in (pieces, newest))


def _peak(
    engine: Engine, known: Sequence[Tensor], sizes: KVCacheSizes, chosen: list[tuple[Running, Segment]]
) -> int:
    with (
        engine.rehearsal(sizes) as (cache, advance),
        replace(current_step(), widest_spread=True).installed(),
    ):
        # Pages are known from the beginning: the pass sees those of a layer when it comes to it.
        counter = StorageCounter(
            engine.device, [*known, *cache.stores], partial(getattr, cache.staging, "bytes")
        )
        with counter:
            advance(chosen)
        return counter.peak


def _pass(
    engine: Engine, counts: Sequence[int], end: int, extent: Extent, rows: int, runs: tuple[Run, ...]
) -> list[tuple[Running, Segment]]:
    found: list[tuple[Running, Segment]] = []
    start = 0
    for number, count in enumerate(counts):
        segment = Segment(start, count, end - count, runs)
        if engine.row_length([*(one for _, one in found), segment]) > rows:
            break
        request = Request(ids=(0,) * end, sampling=extent.sampling)
        running = Running(number, request, engine.page, [0] * end, [])
        found.append((running, segment))
        start += count
    return found


class StorageCounter(TorchDispatchMode):
    """Inside, `peak` is the most bytes on `device` that were alive at once, besides those of `known` tensors and what
    `besides()` says."""

    def __init__(
        self, device: torch.device, known: Iterable[Tensor], besides: Callable[[], int] = int
    ) -> None:
        super().__init__()
        self.peak = 0
        self._device, self._besides = device.type, besides
        self._known = list(known)  # kept alive, so that no other storage has the identity of one
        self._seen: dict[int, Any] = {id(one.untyped_storage()): None for one in self._known}
        self._bytes = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Each callback holds the counter: without it, all that the counter holds is freed now.
        self._seen.clear()
        self._known.clear()
        self._besides = int

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in leaves_of((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self._see(leaf)
        self.peak = max(self.peak, self._bytes - self._besides())
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._seen:
            count = storage.nbytes()
            self._bytes += count
            self._seen[key] = weakref.ref(storage, lambda _: self._gone(key, count))

    def _gone(self, key: int, count: int) -> None:
        del self._seen[key]
        self._bytes -= count
