"""Generation within a byte budget: weights in tiers, the workspace measured, and a plan for each run's requests.

Every module that may leave the device lies in a tier from the beginning; those that the plan lets stay are read once
and kept. Before requests run that are longer than any before, the workspace of their passes is measured with as few
weights on the device as there can be: first for one request, which tells the smallest budget, then for as many as are
sure to fit, since the workspace grows at most in proportion to the requests.

Weights of a model that is spread over ranks stay where they are. Its ranks agree on every number that a decision
depends on, the largest of sizes and the smallest of budgets, so that all of them take the same decisions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hyper_parallel.compat import backend
from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.kv_cache.sizes import ALIGN, KVCacheSizes, page_bytes
from hyper_parallel.inference.kv_cache.tiers import CacheReport
from hyper_parallel.inference.memory_needs import Extent, Needs, StorageCounter, measure
from hyper_parallel.inference.memory_plan import MemoryPlan, Sizes, make_plan, smallest
from hyper_parallel.inference.rank_groups import Agreement
from hyper_parallel.inference.request import Request
from hyper_parallel.inference.weights.fingerprint import Fingerprint
from hyper_parallel.inference.weights.stream import WeightStream, storage_bytes
from hyper_parallel.inference.weights.tiers import WeightSource, WeightTiers, movable, slot_bytes
from hyper_parallel.inference.weights.units import Unit, units_of
from hyper_parallel.inference.weights.weight_stand_in import ReadElsewhere
from hyper_parallel.offloading.open_tiers import open_tiers
from hyper_parallel.offloading.tiers import Tier
from hyper_parallel.shard.sharded_model import is_sharded, local_of
from hyper_parallel.strategy.memory import GenerationMemory
from hyper_parallel.units import format_bytes, round_up

log = logging.getLogger(__name__)

_OF_FREE = 0.95
"""Of what is free on the device: the rest is for what the allocator rounds up and leaves between blocks."""


@dataclass(frozen=True)
class _Chosen:
    """A plan, and for what it was made."""

    plan: MemoryPlan
    budget: int
    settings: Inference
    extent: Extent
    most: int

    def suits(self, budget: int, needs: Needs, most: int) -> bool:
        """Whether it also is one for other requests, so that what the KV cache holds can stay."""
        same = all(
            getattr(self.settings, key) == getattr(needs.settings, key) for key in ("pages", "rows", "batch")
        )
        sizes = self.plan.cache.sizes
        return (
            (self.plan.cache.tiered or sizes.pinned > 0)
            and needs.pinned <= sizes.pinned
            and self.budget == budget
            and same
            and needs.extent.within(self.extent)
            and most <= self.most
        )


class MemoryBudget:
    """The memory of one model."""

    def __init__(
        self,
        model: nn.Module,
        source: WeightSource,
        memory: GenerationMemory,
        device: torch.device,
        *,
        restore: bool,
        agreement: Agreement | None = None,
    ) -> None:
        """`restore`: give the model its weights back at the end. `agreement`: between the ranks that run the same
        passes, which all make a budget. Raises TierError for a tier that cannot be opened."""
        self._restore, self._closed = restore, False
        self._agreement = agreement or Agreement()
        self.plan: MemoryPlan | None = None
        """Of the last run."""
        self.device = device
        self._memory = memory
        self._tiers = tiers_for_weights(memory)
        budget = _free(model, device) if memory.device == "auto" else int(memory.device or 0)
        (self.budget,) = self._agreement.smallest([budget])
        """Bytes of the device."""
        try:
            units, room = units_in_tiers(model, self._tiers, self.budget)
            stored = WeightTiers(units, self._tiers, room)
            left = self._agreement.smallest(
                [tier.capacity - stored.taken[name] for name, tier in self._tiers.items()]
            )
            self._room = dict(zip(self._tiers, left, strict=True))
            """Bytes of each tier for the KV cache."""
            buffer = torch.empty(max(map(slot_bytes, units), default=0), dtype=torch.uint8, device=device)
            for unit in units:
                stored.write(unit, buffer, source.fill)
                source.stored(unit)
            source.rest(units, device)
        except BaseException:
            self._close_tiers()
            raise
        finally:
            source.close()
        del buffer
        self.stream = WeightStream(model, units, stored, device)
        self._sizes = self._sizes_now(0)
        self._measured: dict[tuple[int, int], list[tuple[Extent, int]]] = {}
        self._proof = 0
        self._model = model
        self._chosen: _Chosen | None = None
        """Nothing was placed since."""

    def prove(self, engine: Engine, prove: Callable[[], None]) -> None:
        """Compare the engine with the model, within the budget; from then on runs of the engine keep to it.

        Raises ConfigError if it is too small, and what `prove` raises.
        """
        engine.cache.spare = False
        while True:
            least = self._place_least()
            try:
                counter = StorageCounter(self.device, self.stream.known())
                with counter:
                    prove()
                break
            except ReadElsewhere as found:
                self._keep(found.module)
        self._proof = least.device + self._measured_by_all(counter.peak)
        if self._proof > self.budget:
            raise self._too_small(0, "")
        engine.fit = self.fit
        engine.cache.version = Fingerprint(self._model, self.stream.constant)

    def fit(self, engine: Engine, requests: Sequence[Request], settings: Inference) -> Inference:
        """Place the weights for these requests; the settings with the requests at once and the pages that fit.

        Raises ConfigError, with the smallest budget and what would lower it, for a budget that is too small.
        """
        if not requests:
            return settings
        engine.cache.check_idle()
        needs = self._needs(engine, requests, settings)
        most = min(settings.batch, len(requests))
        if self._chosen is None or not self._chosen.suits(self.budget, needs, most):
            plan = self._best(engine, needs, most)
            self._place(plan)
            self._lay_cache(engine, plan)
            self._chosen = _Chosen(plan, self.budget, settings, needs.extent, most)
        plan = self._chosen.plan
        return settings.model_copy(update={"batch": min(plan.requests, settings.batch), "pages": plan.pages})

    def _best(self, engine: Engine, needs: Needs, most: int) -> MemoryPlan:
        """The plan with the lowest cost, for `most` requests at once or fewer."""
        found = {1: self._workspace(engine, 1, needs)}
        floor = needs.floor(1, found[1])
        if max(floor, self._proof) > self.budget:
            raise self._too_small(floor, needs.terms(found[1]))
        while (known := max(found)) < most:
            # Sure to fit: the workspace grows at most in proportion.
            sure = [
                count
                for count in range(known + 1, most + 1)
                if needs.floor(count, -(-found[known] * count // known)) <= self.budget
            ]
            if not sure:
                break
            found[sure[-1]] = self._workspace(engine, sure[-1], needs)
        plans = []
        for count in {*(2**power for power in range(most.bit_length())), *found}:
            bound = min((known for known in found if known >= count), default=None)
            if bound is not None:
                plans.append(needs.plan(self.budget, count, found[bound]))
        return min((plan for plan in plans if plan is not None), key=lambda plan: (plan.cost, -plan.requests))

    def _lay_cache(self, engine: Engine, plan: MemoryPlan) -> None:
        """The next run has a KV cache of these sizes."""
        sizes = plan.cache.sizes
        if not plan.cache.tiered and not sizes.pinned:
            engine.cache.separate()
            return
        engine.cache.configure(sizes, partial(tiers_for_cache, self._memory, sizes, self._sizes.page))

    def smallest(self, engine: Engine, requests: Sequence[Request], settings: Inference) -> int:
        """The smallest budget with which `fit` finds a plan for these requests. Places weights as for that."""
        engine.cache.check_idle()
        needs = self._needs(engine, requests, settings)
        return self._advised(max(needs.floor(1, self._workspace(engine, 1, needs)), self._proof))

    @property
    def report(self) -> str:
        """The bytes that were moved, in words; empty where none were."""
        read = [f"{format_bytes(count)} from {name}" for name, count in self.stream.tiers.read.items()]
        return f"{', '.join(read)} ({self.stream.stall:.1f} s waited)" if read else ""

    def unused(self, cache: CacheReport) -> tuple[str, ...]:
        """Tiers to which neither weights nor, by its report, keys and values were moved."""
        used = {one.name for one in cache.tiers if one.written + one.read}
        return tuple(
            name for name in self._tiers if not self.stream.tiers.bytes.get(name) and name not in used
        )

    def close(self) -> None:
        """End, once, and close the tiers."""
        if not self._closed:
            self._closed = True
            try:
                self.stream.close(self._restore)
            finally:
                self._close_tiers()

    def _close_tiers(self) -> None:
        for tier in self._tiers.values():
            tier.close()

    def _needs(self, engine: Engine, requests: Sequence[Request], settings: Inference) -> Needs:
        cache, page = engine.cache, engine.page
        self._sizes = self._sizes_now(page_bytes(cache.shapes, cache.stored))
        own = {"stored": cache.stored, "pinned": cache.pinned}
        return Needs(self._sizes, cache.shapes, page, requests, settings, self._room, **own)

    def _workspace(self, engine: Engine, count: int, needs: Needs) -> int:
        """The workspace of passes of `count` requests; measured unless it was for such requests."""
        known = self._measured.setdefault((count, needs.settings.rows), [])
        for other, bytes_ in known:
            if needs.extent.within(other):
                return bytes_
        # What outlives runs is not in the plan of this.
        engine.cache.close()
        self._chosen = None
        self._place_least()
        bytes_ = self._measured_by_all(
            measure(
                engine,
                self.stream.known(),
                count,
                needs.extent,
                needs.settings,
            )
        )
        known.append((needs.extent, bytes_))
        return bytes_

    def _measured_by_all(self, peak: int) -> int:
        """The largest of the ranks' peaks. With several ranks a little more: when a collective lets go of its tensors
        depends on the others."""
        (most,) = self._agreement.largest([peak])
        return most if self._agreement.alone else most + most // 128

    def _advised(self, floor: int) -> int:
        """The budget to ask for, which suffices whenever this is measured again."""
        return floor if self._agreement.alone else floor + floor // 32

    def _keep(self, name: str) -> None:
        """The model's code reads the weights of this module elsewhere: they stay on the device for good."""
        log.warning(
            "%s: its weights are read outside of its forward pass; they stay on the device (%s)",
            name,
            format_bytes(self.stream.keep(name)),
        )
        self.plan = None
        self._sizes = self._sizes_now(self._sizes.page)

    def _place_least(self) -> MemoryPlan:
        """As few weights on the device as there can be."""
        least = smallest(self._sizes, pages=0, workspace=0)
        plan = make_plan(self._sizes, least, requests=1, pages=0, workspace=0)
        assert plan is not None, "the smallest budget has a plan"
        self._place(plan)
        return plan

    def _place(self, plan: MemoryPlan) -> None:
        if self.plan is None or (plan.resident, plan.gathered, plan.buffer) != (
            self.plan.resident,
            self.plan.gathered,
            self.plan.buffer,
        ):
            units = self.stream.units
            self.stream.place(
                [units[place] for place in plan.resident],
                [units[place] for place in plan.gathered],
                plan.buffer,
            )
        self.plan = plan

    def _sizes_now(self, page: int) -> Sizes:
        (fixed,) = self._agreement.largest([self.stream.fixed])
        return Sizes(self.stream.sizes, fixed, page)

    def _too_small(self, floor: int, why: str) -> ConfigError:
        """For requests that need `floor` bytes; the comparison of `prove` may need more."""
        if self._proof > floor:
            weights = smallest(self._sizes, pages=0, workspace=0)
            floor = self._proof
            why = (
                f"{format_bytes(weights)} of weights, and {format_bytes(floor - weights)} for a comparison with the "
                "model's own forward pass (lower inference.page)"
            )
        where = ""
        if is_sharded(self._model):
            where = ", or spread the model over more devices"
        elif not self._tiers:
            where = ", or set memory.host, pool or flash, so that weights can leave the device"
        floor = self._advised(floor)
        return ConfigError(
            f"memory.device is {self.budget} bytes, and generation needs at least {floor} ({format_bytes(floor)}): "
            f"{why}; raise it{where}"
        )


def _free(model: nn.Module, device: torch.device) -> int:
    """Bytes that are free on the device, with those that the model holds there."""
    held = storage_bytes(local_of(x) for x in (*model.parameters(), *model.buffers()) if x.device == device)
    return int(_OF_FREE * (backend().memory_free() + held))


# The tiers of a memory budget: opened once for weights, and once for the KV cache with the bytes that these leave.
#
# The slots of a tier are reserved together, so that the two cannot share one. Weights leave a quarter of each tier
# where the device has room for twice what stays on it then.

_FOR_CACHE = 0.25


def tiers_for_weights(memory: GenerationMemory) -> dict[str, Tier]:
    """All tiers of a budget. Raises TierError."""
    return _opened(memory.host, memory.flash, memory.pool, "weights")


def tiers_for_cache(memory: GenerationMemory, sizes: KVCacheSizes, page_bytes: int) -> dict[str, Tier]:
    """The tiers in which the KV cache has pages, as large as these. Raises TierError."""
    slot = round_up(sizes.block * page_bytes, ALIGN)
    host, pool, flash = (
        getattr(sizes, name) // sizes.block * slot or None for name in ("host", "pool", "flash")
    )
    return _opened(host, memory.flash if flash else None, pool, "keys and values")


def units_in_tiers(
    model: nn.Module, tiers: Mapping[str, Tier], budget: int
) -> tuple[list[Unit], dict[str, int]]:
    """The modules that lie in tiers, as many as there is room for, and the bytes of each tier for them. None of a model
    that is spread over ranks."""
    room = {name: tier.capacity for name, tier in tiers.items()}
    if not tiers or is_sharded(model):
        return [], room
    units = units_of(model)
    total = sum(one.nbytes for one in model.parameters())
    part = {name: int((1 - _FOR_CACHE) * count) for name, count in room.items()}
    some = movable(units, tiers, part)
    if 2 * (total - sum(unit.bytes for unit in some)) <= budget:
        return some, part
    return movable(units, tiers, room), room


def _opened(host: int | None, flash: str | None, pool: int | None, what: str) -> dict[str, Tier]:
    shared = None if pool is None else (pool, f"generate-{os.getpid()}-{what}", f"generation, {what}")
    with outside_modes():  # this memory is not the device's
        return open_tiers(backend(), host, flash, shared)
