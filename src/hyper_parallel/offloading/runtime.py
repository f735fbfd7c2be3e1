"""Offload runtime: begins the copies of a planned graph, waits for them, and watches how fast its links are."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from hyper_parallel.errors import TierError
from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.host_nodes import OperatorCall, run, taken
from hyper_parallel.offloading.schedule.problem import OffloadTier, Rate
from hyper_parallel.offloading.tiers import Pending, Tier, Workplace

# Executes tier operators: starts copies, waits for them, frees and reallocates memory.
#
# Between steps what rests in a slot has a storage of no bytes. `rest` brings state there, before the first step and
# when another graph wants it elsewhere; `present` lends a tensor to whoever wants to look at it in between.


class Runtime:
    """Runs the cache operators of one graph (`graph.executable`'s `cache`), and keeps its state at rest."""

    def __init__(
        self, step: StepGraph, tiers: Mapping[str, Tier], watch: BandwidthMonitor | None = None
    ) -> None:
        """`tiers`: by the names that the slots have, with room for these slots (`reserve`). `watch`: what is shown the
        copies, to see how fast links are."""
        self.step = step
        self._slots, self._tiers, self._watch = step.slots, tiers, watch
        self._outside = step.outside
        self._at_rest = {
            self._outside[slot.storage].name: number
            for number, slot in step.slots.items()
            if slot.rest != "step"
        }
        """Name of a state input to the slot that it relies on between steps."""
        self._pending: dict[int, Pending] = {}
        self._bytes: dict[int, int] = {}
        """Slot to the bytes that are in it: fewer than it has room for where the data decide how many."""
        self._left: dict[int, int] = {}
        """Storage that was given up in a step to the slot that it is in."""
        self._filling: set[int] = set()
        """Slots from which a storage is being filled, or was to be."""
        self.blocked = 0.0
        """Seconds that waits have held up the caller so far."""
        self.copied: Counter[tuple[str, bool]] = Counter()
        """Bytes copied so far, by tier and whether they went out to it."""

    @property
    def moved(self) -> int:
        """Bytes copied so far, both ways together."""
        return self.copied.total()

    # The operators.

    def store(self, x: torch.Tensor, slot: int, tier: str) -> None:
        """Begin to copy the storage of `x` to its slot."""
        given = whole(x)
        self._pending[slot] = self._tiers[tier].begin_write(slot, given)
        self._bytes[slot] = given.numel()
        self._begun(slot, tier, True, given.numel())

    def prefetch(self, x: torch.Tensor, slot: int, tier: str) -> None:
        """Give the storage of `x` its memory, and begin to fill it."""
        x.untyped_storage().resize_(self._bytes.get(slot, self._slots[slot].bytes))
        given = whole(x)
        self._filling.add(slot)
        self._pending[slot] = self._tiers[tier].begin_read(slot, given)
        self._begun(slot, tier, False, given.numel())

    def wait(self, x: torch.Tensor, slot: int, tier: str) -> None:
        """Wait until the slot's copy is over; nothing where none is under way."""
        pending = self._pending.pop(slot, None)
        if pending is not None:
            try:
                self.blocked += pending.wait()
            except TierError as error:
                raise type(error)(f"{error} (slot {slot}: {self._what(slot)})") from error
            self._filling.discard(slot)

    def detach(self, x: torch.Tensor, slot: int, tier: str) -> None:
        """Give up the memory of the storage of `x`."""
        x.untyped_storage().resize_(0)
        self._left[self._slots[slot].storage] = slot

    def update(
        self,
        calls: Sequence[OperatorCall],
        moved: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        slots: Sequence[int],
        tier: str,
    ) -> None:
        """Begin to run an update of the optimizer on what lies in slots, beside the device."""
        place = self._tiers[tier]
        assert isinstance(place, Workplace), f"the host cannot compute in {tier}"
        # Not the tensors: the step goes on, and may give their memory up before the host comes to them.
        numbers = taken(given)
        place.begin_work(f"the update {calls[-1].name}", slots, lambda memory: run(calls, memory, numbers))

    def stopped(self, state: Mapping[str, torch.Tensor]) -> None:
        """The step was left before it wrote to any state: bring it to where it is between steps."""
        for number in list(self._pending):
            with contextlib.suppress(TierError):  # which may be why the step was left
                self._pending.pop(number).wait()
                self._filling.discard(number)
        # What leaves the device first makes room for what comes to it.
        for name, x in state.items():
            if self.away(name):
                x.untyped_storage().resize_(0)
        for storage, entry in self._outside.items():
            name, slot = entry.name, self._left.get(storage)
            if name not in state or self.away(name) or slot is None:
                continue
            if slot in self._filling or not state[name].untyped_storage().nbytes():
                self.prefetch(state[name], slot, self._slots[slot].tier)
                self.wait(state[name], slot, self._slots[slot].tier)

    def _what(self, slot: int) -> str:
        """The content of a slot, in words."""
        storage = self._slots[slot].storage
        if storage in self._outside:
            return self._outside[storage].name
        if storage in self.step.gradients:
            return f"the gradient of {self.step.gradients[storage]}"
        of = (node for node in self.step.nodes if storage in {value.storage for value in values_of(node)})
        return f"a tensor of {next((node.meta['module'] for node in of), '') or 'the step'}"

    def _begun(self, slot: int, tier: str, out: bool, count: int) -> None:
        self.copied[tier, out] += count
        if self._watch is not None:
            self._watch.began(tier, out, count, self._pending[slot])

    # Between steps.

    def rest(self, name: str, x: torch.Tensor) -> None:
        """Bring a state input, whose values are in `x`, to where the graph wants it as a step begins."""
        number = self._at_rest.get(name)
        if number is None:
            return
        slot = self._slots[number]
        self.store(x, number, slot.tier)
        self.wait(x, number, slot.tier)
        if slot.rest == "away":
            self.detach(x, number, slot.tier)

    @contextlib.contextmanager
    def present(self, name: str, x: torch.Tensor, changed: bool = False) -> Iterator[None]:
        """Inside, a state input has its memory and its values. `changed`: what is written to it is to last."""
        number = self._at_rest.get(name)
        if number is None:
            yield
            return
        slot = self._slots[number]
        self.bring(name, x)
        try:
            yield
        finally:
            if changed:
                self.store(x, number, slot.tier)
                self.wait(x, number, slot.tier)
            if slot.rest == "away":
                self.detach(x, number, slot.tier)

    @property
    def resting(self) -> Collection[int]:
        """The slots that it relies on between steps."""
        return self._at_rest.values()

    def away(self, name: str) -> bool:
        """Whether a state input has no memory between steps."""
        number = self._at_rest.get(name)
        return number is not None and self._slots[number].rest == "away"

    def bring(self, name: str, x: torch.Tensor) -> None:
        """A state input has its memory and its values again, for good."""
        number = self._at_rest.get(name)
        if number is None:
            return
        slot = self._slots[number]
        self.wait(x, number, slot.tier)
        if slot.rest == "away":
            self.prefetch(x, number, slot.tier)
            self.wait(x, number, slot.tier)

    def pass_on(self, name: str, x: torch.Tensor, to: Runtime) -> None:
        """Bring a state input from where this graph wants it between steps to where another does."""
        number = self._at_rest.get(name)
        if number is None or number != to._at_rest.get(name):
            self.bring(name, x)
            to.rest(name, x)
            return
        # Both find it in the same slot.
        slot, before, after = self._slots[number], self.away(name), to.away(name)
        self.wait(x, number, slot.tier)
        if after and not before:
            self.detach(x, number, slot.tier)
        elif before and not after:
            self.prefetch(x, number, slot.tier)
            self.wait(x, number, slot.tier)


def whole(x: torch.Tensor) -> torch.Tensor:
    """The storage of `x` as uint8 [n]."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,))


# Bandwidth monitor: whether links are as fast as the offload plan assumes.
#
# Of each link, a tier in one direction, and each step, over the step's large copies, in seconds that they had the link:
#
#     ratio(step) = Σ seconds / Σ (latency + bytes / bandwidth)       by the rate of the plan  `BandwidthMonitor.ended`
#     ratio = median of ratio(step) over the last STEPS steps                                  `BandwidthMonitor.ratios`
#     rate as measured = (latency · ratio, bandwidth / ratio)
# `BandwidthMonitor.measured`
#
# A link departs from its plan when every one of those steps did, in the same direction, by more than DEPARTS. What a
# copy waits for, those before it on its link among them, is not the link's time, and small copies say little about
# bytes.

STEPS = 8
"""Looked back at."""
DEPARTS = 1.2
"""Times as slow as planned, or as fast."""
LARGE = 256 * 2**10
"""Bytes of the smallest copy that counts."""
FIRST = 4
"""Steps at the beginning that are not looked at: memory is touched for the first time in them."""

Link = tuple[str, bool]
"""Tier, and whether copies go out to it."""


class BandwidthMonitor:
    """The rates of a rank's links in the last steps."""

    def __init__(self, spaces: Sequence[OffloadTier]) -> None:
        """`spaces`: with the rates that plans go by."""
        self._spaces = tuple(spaces)
        self._rates: dict[Link, Rate] = {}
        self._ratios: dict[Link, deque[float]] = defaultdict(lambda: deque(maxlen=STEPS))
        self._copies: list[tuple[Link, int, Pending]] = []
        self._steps = 0
        self.plan_by(spaces)

    def plan_by(self, spaces: Sequence[OffloadTier]) -> None:
        """Plans go by these rates from now on; nothing is known yet of how right they are."""
        self._spaces = tuple(spaces)
        for space in spaces:
            self._rates[space.name, True], self._rates[space.name, False] = space.out, space.back
        self._ratios.clear()

    def began(self, tier: str, out: bool, count: int, copy: Pending) -> None:
        """A copy of `count` bytes is under way."""
        if count >= LARGE and (tier, out) in self._rates:
            self._copies.append(((tier, out), count, copy))

    def ended(self) -> None:
        """A step is over."""
        self._steps += 1
        seconds: dict[Link, float] = defaultdict(float)
        predicted: dict[Link, float] = defaultdict(float)
        left = []
        for link, count, copy in self._copies:
            if copy.seconds is not None:
                seconds[link] += copy.seconds
                predicted[link] += self._rates[link].seconds(count)
            elif not copy.done():
                left.append((link, count, copy))
        self._copies = left
        if self._steps > FIRST:
            for link, known in predicted.items():
                self._ratios[link].append(seconds[link] / known)

    @property
    def ratios(self) -> dict[Link, float]:
        """For each link that was seen for long enough, how many times as long as planned its copies take."""
        return {link: statistics.median(known) for link, known in self._ratios.items() if len(known) == STEPS}

    @property
    def departed(self) -> dict[Link, float]:
        """The links that are slower or faster than planned in step after step."""
        return {link: self.ratios[link] for link, known in self._ratios.items() if _departs(known)}

    def measured(self) -> tuple[OffloadTier, ...]:
        """The spaces with their rates as they were in the last steps."""
        return tuple(
            replace(space, out=self._measured(space.name, True), back=self._measured(space.name, False))
            for space in self._spaces
        )

    def told(self) -> Iterator[str]:
        """The rates of each link that departed, as measured and as planned."""
        for (tier, out), ratio in sorted(self.departed.items()):
            planned = self._rates[tier, out].bandwidth
            way = "to" if out else "from"
            yield f"{way} {tier} {planned / ratio / 1e9:.3g} GB/s instead of {planned / 1e9:.3g}"

    def _measured(self, tier: str, out: bool) -> Rate:
        rate, ratio = self._rates[tier, out], self.ratios.get((tier, out), 1.0)
        return Rate(rate.latency * ratio, rate.bandwidth / ratio)


def _departs(ratios: Sequence[float]) -> bool:
    return len(ratios) == STEPS and (min(ratios) > DEPARTS or max(ratios) < 1 / DEPARTS)
