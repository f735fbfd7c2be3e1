"""Memory needs of some requests: the smallest budget and the best plan for a number of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.config.inference import Inference
from hyper_parallel.inference.kv_sizes import KVCacheSizes, LayerShape
from hyper_parallel.inference.memory_plan import MemoryPlan, Sizes, make_plan, smallest
from hyper_parallel.inference.request import Request
from hyper_parallel.inference.scheduler import pages_for
from hyper_parallel.inference.workspace import Extent
from hyper_parallel.units import format_bytes


class Needs:
    """Of some requests on one model."""

    def __init__(
        self,
        sizes: Sizes,
        shapes: Sequence[LayerShape],
        page: int,
        requests: Sequence[Request],
        settings: Inference,
    ) -> None:
        self.settings = settings
        self.extent = Extent.of(requests)
        self._sizes, self._page, self._requests = sizes, page, requests
        rows = -(-self.extent.context // page) * page
        self._staging = KVCacheSizes(device=0, staging=rows).device_bytes(shapes, page)

    def floor(self, count: int, workspace: int) -> int:
        """The smallest budget for `count` requests at once."""
        return smallest(self._sizes, pages=self._pages(count), workspace=workspace, staging=self._staging)

    def plan(self, budget: int, count: int, workspace: int) -> MemoryPlan | None:
        """The best plan for `count` requests at once."""
        return make_plan(
            self._sizes,
            budget,
            requests=count,
            pages=self._pages(count),
            workspace=workspace,
            staging=self._staging,
        )

    def terms(self, workspace: int) -> str:
        """The terms of the smallest budget for one request at once, each with what would lower it."""
        weights = smallest(self._sizes, pages=0, workspace=0)
        cache = self._pages(1) * self._sizes.page + self._staging
        cached = "inference.pages" if self.settings.pages else "inference.max_tokens, or shorten the prompts"
        passed = "inference.page" if self._page > 16 else "the length of the prompts"
        return (
            f"{format_bytes(weights)} of weights, {format_bytes(cache)} of keys and values for the longest request "
            f"(lower {cached}) and {format_bytes(workspace)} of a pass (lower {passed})"
        )

    def _pages(self, count: int) -> int:
        return self.settings.pages or pages_for(self._requests, count, self._page)
