"""Memory needs of some requests: the smallest budget and the best plan for a number of them at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hyper_parallel.config.inference import Inference
from hyper_parallel.inference.budget.plan import MemoryPlan, Sizes, make_plan, smallest
from hyper_parallel.inference.budget.workspace import Extent
from hyper_parallel.inference.kv_cache.plan import KVChoice, KVDemand, kv_choices
from hyper_parallel.inference.kv_cache.sizes import LayerShape
from hyper_parallel.inference.request import Request
from hyper_parallel.units import format_bytes


class Needs:
    """Of some requests on one model. `room`: bytes of tiers for the KV cache, by name, the fastest first."""

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
        """`page`: tokens of a page, of which this process stores `stored`, by default all. `pinned`: pages of prompts
        that stay on the device."""
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
