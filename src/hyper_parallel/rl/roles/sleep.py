"""Sleep of colocated roles: what a role needs in its own turn only leaves the device in the turns of the others.

    turn      needs                               leaves the device
    generate  the rollout's weights, KV cache,    optimizer, critic, reference; the actor's weights unless they generate
              the reward model
    score     the reference                       KV cache, the rollout's own weights, reward model
    train     actor, optimizer, critic            KV cache, the rollout's own weights, reward model, reference
    send      the actor's weights                 KV cache, the rollout's own weights, reward model

What a turn does not name stays where it is. What leaves is copied to a tier and comes back to the same storage, with
the same bits. A part that is `replaced` is given up without a copy, since it gets other values before it is needed; one
that is `constant` is copied once. Checkpoints read and write what is away one tensor at a time
(`compat.memory`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hyper_parallel.compat import backend, memory
from hyper_parallel.config.rl_roles import SleepConfig
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.open_tiers import open_tiers
from hyper_parallel.offloading.runtime import whole
from hyper_parallel.offloading.tiers import Tier
from hyper_parallel.units import format_bytes

Turn = Literal["generate", "score", "train", "send"]
Tensors = Callable[[], Iterable[Tensor]]
"""The tensors of a part as they are now."""
LEAST = 4096
"""Bytes of a storage, below which it stays."""


@dataclass
class _Entry:
    """A storage that has been away."""

    bytes: int
    tier: str
    slot: int
    tensor: Tensor | None = None
    """Of a storage that is away."""


@dataclass
class _Part:
    name: str
    tensors: Tensors
    needed: frozenset[Turn]
    leaves: frozenset[Turn]
    replaced: bool
    constant: bool
    entries: dict[int, _Entry] = field(default_factory=dict)
    """By address of the storage."""
    empty: list[tuple[Tensor, int]] = field(default_factory=list)
    """Storages that were given up without a copy, and their bytes."""
    valid: bool = True
    """The values are those of the part; not of one that was given up and has not been replaced."""


class RoleMemory:
    """The memory of one worker's roles. Not for several threads at once."""

    def __init__(self, settings: SleepConfig | None, device: torch.device) -> None:
        """Without `settings` nothing moves, and bytes are only counted. Raises TierError for a folder that cannot be
        written."""
        self._device, self._backend = device, backend(device.type)
        self._parts: dict[str, _Part] = {}
        self._release: Callable[[], object] = lambda: None
        self._cache_bytes: Callable[[], int] = int
        self._tiers: dict[str, Tier] = {}
        self._sizes: dict[str, dict[int, int]] = {}
        """Of each tier, slot to bytes."""
        self._slots = 0
        self._turn: Turn | None = None
        self._parts_bytes: int | None = None
        """Of all parts on the device; None where it has to be counted again."""
        self._resident: dict[str, int] = {}
        self._moved, self._seconds = 0, 0.0
        self._on = settings is not None
        if settings is not None:
            self._backend.return_memory()
            with _worded():
                self._tiers = open_tiers(self._backend, settings.host, settings.flash)
            self._sizes = {name: {} for name in self._tiers}

    def add(
        self,
        name: str,
        tensors: Tensors,
        *,
        needed: Collection[Turn],
        leaves: Collection[Turn],
        replaced: bool = False,
        constant: bool = False,
    ) -> None:
        """A part that is on the device now. `needed`, `leaves`: in these turns it has to be there, or leaves; in others
        it stays where it is."""
        self._parts[name] = _Part(name, tensors, frozenset(needed), frozenset(leaves), replaced, constant)

    def add_cache(self, release: Callable[[], object], bytes_now: Callable[[], int]) -> None:
        """The KV cache: `release` gives it up; `bytes_now` is what it has on the device."""
        self._release, self._cache_bytes = release, bytes_now

    def turn(self, turn: Turn) -> None:
        """It is this turn from now on. Raises TierError where the tiers have no room or fail."""
        if turn != self._turn:
            self._turn, self._parts_bytes = turn, None
        if not self._on:
            return
        began, before = time.perf_counter(), self._moved
        if turn != "generate":
            self._release()
        with _worded():
            for part in self._parts.values():
                if turn in part.leaves:
                    self._leave(part)
            for part in self._parts.values():
                if turn in part.needed:
                    self._return(part)
        if self._moved > before:
            self._backend.synchronize()
            self._seconds += time.perf_counter() - began

    def changed(self, name: str) -> None:
        """A part has other values: a `replaced` one those that it waited for, a `constant` one new ones."""
        if (part := self._parts.get(name)) is not None:
            part.valid = True
            if part.constant:
                self._forget(part, part.entries)

    def check(self, name: str) -> None:
        """A part is there with its values."""
        part = self._parts.get(name)
        assert part is None or part.valid, f"{name} has been given up, and has no new values"

    def look(self, turn: Turn) -> None:
        """Take note of the bytes on the device in this turn. Parts are counted once in it, the KV cache each time."""
        if self._parts_bytes is None:
            self._parts_bytes = self._count_parts()
        self._resident[turn] = max(self._resident.get(turn, 0), self._parts_bytes + self._cache_bytes())

    def _count_parts(self) -> int:
        storages = {
            storage._cdata: storage.nbytes()
            for part in self._parts.values()
            for storage in (one.untyped_storage() for one in part.tensors())
            if storage.device.type == self._device.type
        }
        return sum(storages.values())

    def metrics(self) -> dict[str, float]:
        """Since the last call: the most bytes on the device at once in each turn, and with sleep the bytes and seconds
        of moves, out and back together."""
        found = {f"resident_bytes_{turn}": float(count) for turn, count in self._resident.items()}
        if self._on:
            found |= {"offloaded_bytes": float(self._moved), "offload_s": self._seconds}
        self._resident, self._moved, self._seconds = {}, 0, 0.0
        return found

    def close(self) -> None:
        """Give the tiers back. What is away is lost."""
        for part in self._parts.values():
            for entry in part.entries.values():
                if entry.tensor is not None:
                    memory.forget(entry.tensor)
        self._parts.clear()
        for tier in self._tiers.values():
            tier.close()

    def _leave(self, part: _Part) -> None:
        leaving: dict[int, Tensor] = {}
        known: set[int] = set()
        for tensor in part.tensors():
            storage = tensor.untyped_storage()
            known.add(storage._cdata)
            if storage.nbytes() >= LEAST and storage.resizable() and storage.device.type == self._device.type:
                leaving.setdefault(storage._cdata, tensor)
        if part.replaced:
            part.empty += [(one, one.untyped_storage().nbytes()) for one in leaving.values()]
            part.valid = part.valid and not leaving
            for tensor in leaving.values():
                tensor.untyped_storage().resize_(0)
            return
        # Storages that are no more: of an optimizer that was given up.
        self._forget(part, [key for key in part.entries if key not in known])
        fresh = self._with_slots(part, leaving)
        writes = []
        for key, tensor in leaving.items():
            entry = part.entries[key]
            if key in fresh or not part.constant:
                writes.append(self._tiers[entry.tier].begin_write(entry.slot, whole(tensor)))
                self._moved += entry.bytes
        for pending in writes:
            pending.wait()
        for key, tensor in leaving.items():
            entry = part.entries[key]
            entry.tensor = tensor
            tensor.untyped_storage().resize_(0)
            memory.keep(tensor, self._lender(entry))

    def _return(self, part: _Part) -> None:
        for tensor, count in part.empty:
            tensor.untyped_storage().resize_(count)
        part.empty.clear()
        reads = []
        for entry in part.entries.values():
            if entry.tensor is None:
                continue
            entry.tensor.untyped_storage().resize_(entry.bytes)
            reads.append(self._tiers[entry.tier].begin_read(entry.slot, whole(entry.tensor)))
            self._moved += entry.bytes
        for pending in reads:
            pending.wait()
        for entry in part.entries.values():
            if entry.tensor is not None:
                memory.forget(entry.tensor)
                entry.tensor = None

    def _lender(self, entry: _Entry) -> memory.Lend:
        @contextlib.contextmanager
        def lend(tensor: Tensor, changed: bool) -> Iterator[None]:
            tier = self._tiers[entry.tier]
            tensor.untyped_storage().resize_(entry.bytes)
            try:
                with _worded():
                    tier.begin_read(entry.slot, whole(tensor)).wait()
                yield
                if changed:
                    with _worded():
                        tier.begin_write(entry.slot, whole(tensor)).wait()
            finally:
                self._backend.synchronize()
                tensor.untyped_storage().resize_(0)

        return lend

    def _with_slots(self, part: _Part, leaving: dict[int, Tensor]) -> set[int]:
        """See that each storage has a slot of its bytes; the keys of those that had none."""
        missing = {
            key: count
            for key, tensor in leaving.items()
            if (count := tensor.untyped_storage().nbytes())
            != (part.entries[key].bytes if key in part.entries else -1)
        }
        if not missing:
            return set()
        self._forget(part, [key for key in missing if key in part.entries])
        room = {name: tier.capacity - _taken(tier, self._sizes[name]) for name, tier in self._tiers.items()}
        grown = set()
        for key, count in missing.items():
            aligned = {name: -(-count // tier.align) * tier.align for name, tier in self._tiers.items()}
            name = next((one for one in room if room[one] >= aligned[one]), None)
            if name is None:
                there = ", ".join(f"{one} {format_bytes(tier.capacity)}" for one, tier in self._tiers.items())
                raise TierError(
                    f"the roles that sleep need {format_bytes(sum(missing.values()))} for {part.name}, more than there "
                    f"is room for ({there}); raise memory.host, or set memory.flash to a folder on a larger disk"
                )
            room[name] -= aligned[name]
            part.entries[key] = _Entry(count, name, self._slots)
            self._sizes[name][self._slots] = count
            self._slots += 1
            grown.add(name)
        for name in grown:
            self._tiers[name].reserve(self._sizes[name])
        return set(missing)

    def _forget(self, part: _Part, keys: Iterable[int]) -> None:
        """These storages have no slots any more; the memory is used again with the next ones."""
        for key in list(keys):
            entry = part.entries[key]
            assert entry.tensor is None, "what is away stays"
            del part.entries[key], self._sizes[entry.tier][entry.slot]


def _taken(tier: Tier, sizes: dict[int, int]) -> int:
    return sum(-(-count // tier.align) * tier.align for count in sizes.values())


@contextlib.contextmanager
def _worded() -> Iterator[None]:
    """Inside, errors of tiers name the keys of this section."""
    try:
        yield
    except TierError as error:
        text = str(error).replace(" or memory.device", "")
        text = text.replace(", or raise memory.device, so that less goes there", "")
        raise type(error)(re.sub(r"\bmemory\.(host|flash)\b", r"roles.sleep.\1", text)) from error
