"""Executes tier operators: starts copies, waits for them, frees and reallocates memory.

Between steps what rests in a slot has a storage of no bytes. `rest` brings state there, before the first step and when
another graph wants it elsewhere; `present` lends a tensor to whoever wants to look at it in between.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from hyper_parallel.errors import TierError
from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.host_update import OperatorCall, run, taken
from hyper_parallel.offloading.runtime.bandwidth_monitor import BandwidthMonitor
from hyper_parallel.offloading.tiers import Pending, Tier, Workplace


class Runtime:
    """What runs the cache operators of one graph (`graph.executable`'s `cache`), and keeps its state at rest."""

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
        """What lies in a slot, in words."""
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
