"""Plan cache: one offload plan for each kind of call, made on first use."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import backend
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph, balanced_sizes, executable, rewritten
from hyper_parallel.graph.dynamic_sizes import largest_sizes
from hyper_parallel.offloading import Runtime
from hyper_parallel.offloading.autograd.budget import Swap, with_resident_inputs
from hyper_parallel.offloading.autograd.capture_passes import (
    ModelCall,
    Passes,
    PassSettings,
    capture_passes,
    exact,
    late,
    staying,
)
from hyper_parallel.offloading.autograd.captured_inputs import CallSignature
from hyper_parallel.offloading.autograd.check_capture import Check
from hyper_parallel.offloading.autograd.python_state import PythonState
from hyper_parallel.offloading.autograd.state_snapshot import Snapshot
from hyper_parallel.offloading.autograd.two_passes import Ready
from hyper_parallel.offloading.open_tiers import cluster_for, machine_of, measured, open_tiers
from hyper_parallel.offloading.schedule.allowed_rewrites import ANY, Choices
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.offload_pass import Offload
from hyper_parallel.offloading.schedule.slot_allocator import SlotAllocator
from hyper_parallel.units import format_bytes

log = logging.getLogger(__name__)

_UNKNOWN = 1 << 40
"""Bytes of a device about which nothing is said."""

MANY = 8
"""Plans from which on it is said that calls differ much."""
MOST = 16
"""Plans of one kind of call that are kept."""


class Plans:
    """Memory beside the device, and the plans that use it."""

    def __init__(
        self,
        device: torch.device,
        budget: int | Swap,
        host: int | None,
        flash: str | Path | None,
        cluster: Cluster | None,
        settings: PassSettings,
        check: bool = True,
    ) -> None:
        """Takes the tiers, and measures how fast they are. `check`: each capture is held against the model's own
        passes. Raises TierError."""
        around = settings.around
        self._check = check and around is None
        strategy = around.handle.strategy if around is not None else None
        self._choices = Choices.of(strategy.memory) if strategy is not None else ANY
        self.load = strategy.memory.expert_load if strategy is not None else 1.0
        """How many times their even share of the rows a rank's experts may get, in plans from now on; the same on all
        ranks, so that all stop where it is not enough."""
        self._budget, self._settings = budget, settings
        self._backend = backend(device.type)
        self._backend.return_memory()
        if cluster is None and strategy is not None:
            cluster = cluster_for(strategy, device.type)
        self._cluster = cluster or machine_of(self._backend)
        self._tiers = open_tiers(self._backend, host=host, flash=flash)
        try:
            self._spaces = measured(
                self._tiers, self._backend, _UNKNOWN if isinstance(budget, Swap) else budget, updates=False
            )
        except BaseException:
            self.close()
            raise
        self._state: PythonState | None = None
        self._known: dict[Hashable, list[Ready]] = defaultdict(list)
        self._shelves = SlotAllocator.of(self._tiers)
        self._numbers = itertools.count()
        self._most: dict[str, int] = {}
        """The most bytes of each thing that were held beside a call."""
        self._made = 0
        self._changed: set[str] = set()
        """Settings that were said to have changed."""
        self.notes: list[str] = []
        """What each plan comes to, in a line."""

    def ready(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        call: CallSignature,
        held: Mapping[str, int],
    ) -> Ready:
        """The plan for a call while so much else is on the device; made now where there is none.

        Raises CaptureError, BudgetError, TierError.
        """
        self._most = {name: max(count, self._most.get(name, 0)) for name, count in held.items()}
        if self._state is None:
            self._state = PythonState(model)
        state = self._state.now(call.objects)
        model_call = ModelCall(model, forward, call, state)
        known = self._known[call.key(state.state.values(), staying(state.state, call.tensors))]
        for ready in reversed(known):  # the last one first
            if not _holds(ready, state, call):
                continue
            more = any(count > ready.held[name] for name, count in held.items())
            if more or (ready.load is not None and ready.load < self.load):
                known.remove(ready)
                ready = self._again(ready, call, held)
                ready.seen = state
                known.append(ready)
            return ready
        self._say_why(known, state)
        begun = time.perf_counter()
        passes = capture_passes(model_call, self._settings)
        log.info(
            "hp.offload: both passes as a graph: %d nodes, captured in %.1f s (inputs: %s)",
            len(list(passes.step.nodes)),
            time.perf_counter() - begun,
            call,
        )
        ready = self._fitting(passes, call, held)
        if self._check:
            self._checked(model_call, ready)
        ready.seen = state
        known.append(ready)
        self._made += 1
        self._forget_oldest(known)
        if self._made == MANY:
            log.warning(
                "hp.offload has made %d plans, one for each shape of input: inputs of few shapes (padded, packed) and "
                "numbers given as tensors save the time that plans take",
                MANY,
            )
        return ready

    def _say_why(self, known: Sequence[Ready], state: Snapshot) -> None:
        """Log what differs from the last call of this kind, once for each setting."""
        if not known:
            return
        changed = state.difference(known[-1].passes.entries or {})
        if changed is not None:
            setting = changed.partition(" ")[0]
            level = logging.INFO if setting in self._changed else logging.WARNING
            self._changed.add(setting)
            log.log(level, "hp.offload: %s has changed: this call is captured and planned anew", changed)

    def _forget_oldest(self, known: list[Ready]) -> None:
        """Keep no more than so many plans of one kind of call, of which settings change again and again."""
        while len(known) > MOST:
            oldest = known.pop(0)
            self._shelves = self._shelves.without(oldest.number)

    def _checked(self, call: ModelCall, ready: Ready) -> None:
        """Raises CaptureError where a plan does not give what the model's own passes give."""
        begun = time.perf_counter()
        try:
            check = Check(call, ready, self._backend)
            check.run(self._tiers, ready.budget, self._reserve)
        except BaseException:
            self._shelves = self._shelves.without(ready.number)
            self._reserve()
            raise
        log.info("hp.offload: checked against the model's own passes in %.1f s", time.perf_counter() - begun)

    def _reserve(self) -> None:
        """Have the plans' slots in the tiers; nothing in them is needed between calls."""
        for name, tier in self._tiers.items():
            places = self._shelves.tiers[name].places
            tier.reserve({})
            tier.reserve(places.sizes, places.offsets)

    def _again(self, ready: Ready, call: CallSignature, held: Mapping[str, int]) -> Ready:
        """In the place of a plan for which too much is held."""
        before, self._shelves = self._shelves, self._shelves.without(ready.number)
        try:
            return self._fitting(ready.passes, call, held)
        except BudgetError:
            self._shelves = before
            raise

    def _fitting(self, passes: Passes, call: CallSignature, held: Mapping[str, int]) -> Ready:
        """A plan with room for the most of each thing that was ever held, if there is one, else for what is held now.

        Once there was more of one thing, and now there is of another: soon there may be of both.
        """
        if self._most != held:
            with contextlib.suppress(BudgetError):
                return self._planned(passes, call, self._most)
        return self._planned(passes, call, held)

    def _planned(self, passes: Passes, call: CallSignature, held: Mapping[str, int]) -> Ready:
        begun = time.perf_counter()
        number = next(self._numbers)
        step = with_resident_inputs(passes.step, held)
        budget = self._bytes(step)
        offload = Offload(
            self._cluster, budget, self._spaces, self._choices, self._shelves, number, self.load
        )
        try:
            rewritten(step, [offload])
        except BudgetError as error:
            raise BudgetError(
                f"hp.offload: {error.why}; give hp.offload a larger budget, or more memory beside the device (host=, "
                "flash=), or call the model with fewer rows",
                error.why,
                error.floor,
            ) from error
        (found,) = offload.found
        self._shelves = found.shelves
        self._reserve()
        beyond = sum(held.values())
        note = f"{found} (inputs: {call}; beside them {format_bytes(beyond)} are held)"
        log.info("hp.offload: %s, planned in %.1f s", note, time.perf_counter() - begun)
        self.notes.append(note)
        runtime = Runtime(found.step, self._tiers)
        run = executable(found.step, cache=runtime)
        step = found.step
        return Ready(passes, run, runtime, dict(held), late(step), number, found.load, budget, exact(step))

    def _bytes(self, step: StepGraph) -> int:
        """Bytes that a step may hold."""
        if not isinstance(self._budget, Swap):
            return self._budget
        sizes, largest = balanced_sizes(step), largest_sizes(step, self.load)
        problem = build_problem(step, self._cluster, _UNKNOWN, self._spaces, sizes, largest)
        return self._budget.budget(step, problem)

    def close(self) -> None:
        """Give the memory back, and let go of the model's Python state."""
        self._known.clear()
        self._state = None
        for tier in self._tiers.values():
            tier.close()


def _holds(ready: Ready, state: Snapshot, call: CallSignature) -> bool:
    """Whether a call finds what a plan's graph was captured under."""
    passes = ready.passes
    if ready.seen is not state:
        if passes.entries is not None and not passes.entries.items() <= state.entries.items():
            return False
        ready.seen = state
    outside = passes.outside_now(state)
    if outside is None:
        return False
    inputs = call.named | outside
    return all(question.holds(inputs) for question in passes.questions)
