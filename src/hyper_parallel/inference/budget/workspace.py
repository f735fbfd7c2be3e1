"""Workspace of a pass, measured: the bytes that the largest passes hold beside weights and KV cache.

Two passes are the largest: one of pieces of prompts at the end of the longest prompt (masks, activations of most
rows), and one of the newest tokens of b requests at the end of the longest answers (logits, contexts). Both are run
with made-up tokens on the model itself, every request reading the same scattered pages, the widest spread of tokens
over experts, and a draw with every filter that a request has; a counter of live storages takes the peak. What is
measured for b requests bounds what any pass of at most b of these requests holds, and grows at most in proportion to
b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from hyper_parallel.config.inference import Inference, Sampling
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.inference.budget.live_bytes import LiveBytes
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.kv_cache.page_allocator import Run
from hyper_parallel.inference.kv_cache.sizes import LEAST, KVCacheSizes
from hyper_parallel.inference.ragged_pass import Segment
from hyper_parallel.inference.request import Request
from hyper_parallel.inference.running import Running


@dataclass(frozen=True)
class Extent:
    """The largest of some requests. `context`: tokens that one caches at most."""

    prompt: int
    context: int
    sampling: Sampling

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Extent:
        """Of all of them together."""
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
    return max(
        _peak(engine, known, sizes, chosen)
        for chosen in _passes(engine, count, extent, settings.rows, scattered)
    )


def _peak(
    engine: Engine, known: Sequence[Tensor], sizes: KVCacheSizes, chosen: list[tuple[Running, Segment]]
) -> int:
    with (
        engine.rehearsal(sizes) as (cache, advance),
        replace(current_step(), widest_spread=True).installed(),
    ):
        # Pages are known from the beginning: the pass sees those of a layer when it comes to it.
        counter = LiveBytes(engine.device, [*known, *cache.stores], partial(getattr, cache.staging, "bytes"))
        with counter:
            advance(chosen)
        return counter.peak


def _passes(
    engine: Engine, count: int, extent: Extent, rows: int, runs: tuple[Run, ...]
) -> list[list[tuple[Running, Segment]]]:
    piece = min(engine.page, extent.prompt)
    pieces = _pass(engine, [piece] * count, extent.prompt, extent, rows, runs)
    newest = _pass(engine, [1] * count, extent.context, extent, rows, runs)
    return [pieces, newest]


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
