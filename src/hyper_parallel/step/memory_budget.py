"""Memory budget of a run: its tiers, the plan of each graph, and state between steps.

Every rank plans for itself, since moves change neither the order of collectives nor a bit of the results.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from hyper_parallel.compat import backend
from hyper_parallel.compat.memory import forget, keep, settling
from hyper_parallel.offloading import OffloadTier, Runtime
from hyper_parallel.offloading.open_tiers import cluster_for, measured, open_tiers
from hyper_parallel.offloading.runtime import BandwidthMonitor
from hyper_parallel.offloading.schedule.allowed_rewrites import Choices
from hyper_parallel.offloading.schedule.offload_pass import Offload, Planned
from hyper_parallel.offloading.schedule.slot_allocator import SlotAllocator
from hyper_parallel.report.wait_line import note_progress
from hyper_parallel.strategy import Strategy


class Budget:
    """The memory of one rank of a run."""

    def __init__(self, strategy: Strategy, device: torch.device | str, run: str = "", rank: int = 0) -> None:
        """Takes the tiers, and measures how fast they are. `run`: what the ranks of a run have in common and no other
        run has. Raises ConfigError, TierError."""
        memory = strategy.memory
        assert memory.device is not None, "a budget"
        self.bytes = memory.device
        self._cluster = cluster_for(strategy, torch.device(device).type)
        self._choices = Choices.of(memory)
        if strategy.axes.pipeline > 1:
            # Other ranks wait for what an instruction sends: no other goes first.
            self._choices = replace(self._choices, order=False)
        self._backend = backend(torch.device(device).type)
        self._backend.return_memory()
        pool = None
        if memory.pool is not None:
            shared = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()
            pool = (memory.pool, shared, f"rank {rank}")
        self._tiers = open_tiers(self._backend, memory.host, memory.flash, pool)
        world = strategy.axes.world
        on_host = self._choices.update != "device"
        self._spaces = list(measured(self._tiers, self._backend, self.bytes, world, updates=on_host))
        self.watch = BandwidthMonitor(self._spaces)
        """How fast the tiers are while steps run."""
        self._shelves = self._reserved = SlotAllocator.of(self._tiers)
        """Where the slots of all graphs are to lie, and where those lie that the tiers have room for."""
        self._numbers = itertools.count()
        self._plans: dict[Runtime, int] = {}
        """What runs each plan, and the number by which the shelves know it."""
        self.found: dict[Runtime, Planned] = {}
        """What runs each step, and its plan."""
        self._outdated: Runtime | None = None
        self._current: Runtime | None = None
        self.plans: list[str] = []
        """What each graph's plan comes to, in a line."""
        self._settled: dict[str, torch.Tensor] = {}
        """State inputs that rest where their graph wants them."""
        self._stalled = 0.0
        self._dropped: Counter[tuple[str, bool]] = Counter()
        self._dropped_wait = 0.0

    @property
    def peak(self) -> int:
        """The most bytes on the device that any plan in use comes to, by the sizes of the step's tensors."""
        return max((found.plan.peak for found in self.found.values()), default=0)

    @property
    def copied(self) -> Counter[tuple[str, bool]]:
        """Bytes copied so far by all plans, by tier and whether they went out to it."""
        return sum((runtime.copied for runtime in self.found), Counter(self._dropped))

    @property
    def waited(self) -> float:
        """Seconds that this rank's steps, and whoever looked at its state, waited for copies so far."""
        return self._dropped_wait + sum(runtime.blocked for runtime in self.found)

    def offload(self, load: float = 1.0) -> Offload:
        """The pass that keeps a step under the budget; another step may be running meanwhile. `load`: how many times
        their even share of the rows a rank's experts get at most. It raises BudgetError where no plan does."""
        return Offload(
            self._cluster,
            self.bytes,
            tuple(self._spaces),
            self._choices,
            self._shelves,
            next(self._numbers),
            load,
            note_progress,
        )

    def runtime(self, offload: Offload) -> Runtime:
        """What runs the step that this pass has rewritten."""
        (found,) = offload.found
        self._shelves = found.shelves
        self.plans.append(str(found))
        runtime = Runtime(found.step, self._tiers, self.watch)
        self._plans[runtime] = offload.number
        self.found[runtime] = found
        return runtime

    def drop(self, runtime: Runtime) -> None:
        """A step that was planned will not run any more; where its state rests, it does until another one is used."""
        if runtime is self._current:
            self._outdated = runtime
        else:
            self._shelves = self._shelves.without(self._plans.pop(runtime))
            del self.found[runtime]
            self._dropped.update(runtime.copied)
            self._dropped_wait += runtime.blocked

    def forget(self) -> None:
        """The steps that were planned so far will not run."""
        assert self._current is None, "no state rests by one of them"
        self._plans.clear()
        self.found.clear()
        self._shelves = SlotAllocator.of(self._tiers)

    def plan_by(self, spaces: tuple[OffloadTier, ...]) -> None:
        """Plans go by these rates of the tiers from now on."""
        self._spaces = list(spaces)
        self.watch.plan_by(spaces)

    # Where state is between steps.

    def begin(self, runtime: Runtime) -> None:
        """State rests from now on where this graph wants it; called before the state has values.

        Raises TierError where a tier cannot have the memory that the plan wants.
        """
        self._reserve(())
        self._current = runtime

    def settle(self, name: str, tensor: torch.Tensor) -> None:
        """A state input has its values: bring it to where it rests. `compat.memory.present` lends it from there."""
        if self._current is not None:
            self._settled[name] = tensor
            self._current.rest(name, tensor)

            def lend(known: torch.Tensor, changed: bool) -> contextlib.AbstractContextManager[None]:
                assert self._current is not None
                return self._current.present(name, known, changed)

            keep(tensor, lend)

    def settle_others(self, state: Mapping[str, torch.Tensor]) -> None:
        """All state has its values: bring to where it rests what was not brought there yet."""
        for name in sorted(state.keys() - self._settled.keys()):
            # Those of other stages of a pipeline are there without values.
            if not state[name].is_meta:
                self.settle(name, state[name])

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Inside, state goes where it rests as soon as it has its first values."""
        with settling(self.settle):
            yield

    def use(self, runtime: Runtime, state: Mapping[str, torch.Tensor]) -> None:
        """The next step is this graph's: state rests where it wants it. Raises TierError as `begin`."""
        before = self._current
        if before is runtime:
            return
        assert before is not None, "state was settled"
        self._stalled += runtime.blocked - before.blocked
        self._reserve(before.resting)
        # What leaves the device first makes room for what comes to it.
        for name in sorted(state, key=lambda name: (not runtime.away(name), name)):
            before.pass_on(name, state[name], runtime)
        self._current = runtime
        if before is self._outdated:
            self._outdated = None
            self.drop(before)

    def _reserve(self, resting: Collection[int]) -> None:
        """Have room for the slots of all plans, between two steps: what rests in these slots stays."""
        if self._reserved is self._shelves:
            return
        for name, tier in self._tiers.items():
            places = self._shelves.tiers[name].places
            # What lived within a step is of no use any more, and others may come to lie where it lay.
            stays = {slot: count for slot, count in places.sizes.items() if slot in resting}
            tier.reserve(stays, {slot: places.offsets[slot] for slot in stays})
            tier.reserve(places.sizes, places.offsets)
        self._reserved = self._shelves

    def stalled(self) -> float:
        """Seconds that steps have waited for copies since this was asked the last time."""
        now = 0.0 if self._current is None else self._current.blocked
        found, self._stalled = max(0.0, now - self._stalled), now
        return found

    def bring_back(self) -> None:
        """All state has its memory and values again, whatever the budget: for a model that outlives the run."""
        assert self._current is not None, "state was settled"
        for name, tensor in self._settled.items():
            self._current.bring(name, tensor)

    def close(self) -> None:
        """Give the tiers back. What was away has no values any more, unless `bring_back` came first."""
        for tensor in self._settled.values():
            forget(tensor)
        self._settled.clear()
        for tier in self._tiers.values():
            tier.close()
