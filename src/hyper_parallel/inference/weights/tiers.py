"""Weights in tiers: written once, from a model in memory or a folder, and read in every pass.

Modules are spread over the tiers in proportion to what each holds, so that all links are busy at once. A table is cut
into slots of whole rows, which are read one by one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.compat.hf_conversions import has_float32_exceptions
from hyper_parallel.compat.traced_tensors import Source
from hyper_parallel.errors import CheckpointError, ConfigError
from hyper_parallel.inference.weights.units import Part, Unit, by_module
from hyper_parallel.offloading.tiers import Pending, Tier, Workplace
from hyper_parallel.shard.folder_weights import FolderWeights
from hyper_parallel.shard.load_weights import initial_values
from hyper_parallel.shard.safetensors_folder import Folder
from hyper_parallel.units import format_bytes, round_up

Fill = Callable[[Unit, int, Tensor], None]
"""Puts a module's bytes, from one on, into a buffer: all of them, or whole rows of a table."""
_ROWS = 1 << 19
"""Bytes of a slot of a table, at least."""


@dataclass(frozen=True)
class _Slot:
    tier: str
    number: int
    first: int
    last: int


class WeightTiers:
    """Where the bytes of modules are."""

    def __init__(self, units: Sequence[Unit], tiers: Mapping[str, Tier], room: Mapping[str, int]) -> None:
        """`room`: bytes of each tier for weights. Raises ConfigError where they do not hold the modules."""
        self._tiers = tiers
        self._slots: dict[Unit, list[_Slot]] = {}
        self.read: Counter[str] = Counter()
        """Bytes that were read from each tier."""
        shares, left = _shares(units, room), dict(room)
        sizes: dict[str, dict[int, int]] = {name: {} for name in tiers}
        placed: Counter[str] = Counter()
        total = 0
        for unit in units:
            total += unit.bytes
            name = min(
                (name for name in tiers if left[name] >= _rounded(unit, tiers[name])),
                key=lambda name: placed[name] - shares[name] * total,
                default=None,
            )
            if name is None:
                raise ConfigError(
                    f"the weights that may leave the device have {format_bytes(sum(one.bytes for one in units))}, and "
                    f"the tiers hold {format_bytes(sum(room.values()))} beside the KV cache; raise memory.host or "
                    "memory.pool, or set memory.flash to a folder"
                )
            left[name] -= _rounded(unit, tiers[name])
            placed[name] += unit.bytes
            self._slots[unit] = [
                _Slot(name, len(sizes[name]) + place, first, last)
                for place, (first, last) in enumerate(_cuts(unit))
            ]
            sizes[name].update({slot.number: slot.last - slot.first for slot in self._slots[unit]})
        self.bytes = {name: sum(found.values()) for name, found in sizes.items()}
        """Bytes of weights in each tier."""
        self.taken = {
            name: sum(round_up(count, tiers[name].align) for count in found.values())
            for name, found in sizes.items()
        }
        """Bytes of each tier that these need."""
        with outside_modes():
            for name, tier in tiers.items():
                if sizes[name]:
                    tier.reserve(sizes[name])

    def write(self, unit: Unit, buffer: Tensor, fill: Fill) -> None:
        """Write a module's bytes. `buffer`: uint8 on the device, of at least `slot_bytes`; `fill` puts them there."""
        for slot in self._slots[unit]:
            part = buffer[: slot.last - slot.first]
            fill(unit, slot.first, part)
            with outside_modes():
                self._tiers[slot.tier].begin_write(slot.number, part).wait()
            if buffer.device.type != "cpu":  # over for the device's stream is not over for the host
                torch.get_device_module(buffer.device).synchronize()

    def begin_read(self, unit: Unit, buffer: Tensor) -> list[Pending]:
        """Begin to read all of a module to a buffer, uint8 [bytes] on the device."""
        with outside_modes():
            pending = []
            for slot in self._slots[unit]:
                self.read[slot.tier] += slot.last - slot.first
                pending.append(self._tiers[slot.tier].begin_read(slot.number, buffer[slot.first : slot.last]))
            return pending

    def in_memory(self, unit: Unit) -> bool:
        """Whether the host can compute with a module's bytes where they lie."""
        return isinstance(self._tiers[self._slots[unit][0].tier], Workplace)

    def in_place(self, unit: Unit) -> Tensor:
        """A module's bytes where they lie, uint8 [bytes] of the tier's own memory; for one that is `in_memory`."""
        (slot,) = self._slots[unit]
        tier = self._tiers[slot.tier]
        assert isinstance(tier, Workplace), "the host cannot compute there"
        with outside_modes():
            return tier.in_place(slot.number)

    def memory(self) -> list[Tensor]:
        """Memory of tiers that operators may be given: tensors that share storages with it."""
        units = {slots[0].tier: unit for unit, slots in self._slots.items() if unit.expert is not None}
        return [self.in_place(unit) for unit in units.values() if self.in_memory(unit)]

    def rows(self, unit: Unit, wanted: Tensor) -> Tensor:
        """Rows [U, D] of a table by their numbers in ascending order, int64 [U]."""
        part, row = unit.parts[0], unit.row
        numbers = wanted.tolist()
        found = torch.empty(len(numbers), *part.shape[1:], dtype=part.dtype, device=wanted.device)
        flat = found.view(torch.uint8).view(len(numbers), row) if numbers else found
        host = torch.empty(len(numbers), row, dtype=torch.uint8) if wanted.device.type != "cpu" else flat
        place = 0
        for slot in self._slots[unit]:
            begin = place
            while place < len(numbers) and numbers[place] * row < slot.last:
                place += 1
            if begin == place:
                continue
            at = [number - slot.first // row for number in numbers[begin:place]]
            tier = self._tiers[slot.tier]
            if isinstance(tier, Workplace):
                self._gather(tier, slot, at, host[begin:place], row)
                if host is not flat:
                    flat[begin:place].copy_(host[begin:place])
                continue
            buffer = torch.empty(slot.last - slot.first, dtype=torch.uint8, device=wanted.device)
            with outside_modes():
                tier.begin_read(slot.number, buffer).wait()
            self.read[slot.tier] += buffer.numel()
            flat[begin:place] = buffer.view(-1, row)[at]
        return found

    def _gather(self, tier: Workplace, slot: _Slot, at: list[int], out: Tensor, row: int) -> None:
        def work(memory: Sequence[Tensor]) -> None:
            table = memory[0].view(-1, row)
            for target, source in enumerate(at):
                out[target] = table[source]

        with outside_modes():
            tier.begin_work("looking up rows of the embedding", [slot.number], work).wait()
        self.read[slot.tier] += out.numel()


def movable(units: Sequence[Unit], tiers: Mapping[str, Tier], room: Mapping[str, int]) -> list[Unit]:
    """Modules that the tiers hold, as many as there is room for; the others stay on the device. Of experts all of a
    module, since their weights are one stack."""
    left = dict(room)
    found = []
    for group in by_module(units):
        after = dict(left)
        for unit in group:
            name = max(after, key=lambda name: after[name], default=None)
            if name is None or after[name] < _rounded(unit, tiers[name]):
                break
            after[name] -= _rounded(unit, tiers[name])
        else:
            left = after
            found += group
    return found


def slot_bytes(unit: Unit) -> int:
    """Bytes of a module that are written at once."""
    return max(last - first for first, last in _cuts(unit))


def _cuts(unit: Unit) -> list[tuple[int, int]]:
    """First and last byte of each slot."""
    if not unit.tables:
        return [(0, unit.bytes)]
    size = round_up(_ROWS, unit.row)
    end = unit.parts[0].bytes
    return [(first, min(first + size, end)) for first in range(0, end, size)]


def _rounded(unit: Unit, tier: Tier) -> int:
    return sum(round_up(last - first, tier.align) for first, last in _cuts(unit))


def _shares(units: Sequence[Unit], room: Mapping[str, int]) -> dict[str, float]:
    """The part of all bytes that each tier holds: the faster ones as much as they can."""
    total = left = max(sum(unit.bytes for unit in units), 1)
    shares = {}
    for name, bytes_ in room.items():
        shares[name] = min(bytes_, left) / total
        left -= min(bytes_, left)
    return shares


# Where weights come from before they lie in tiers: a model in memory, or a Transformers folder read row by row.
#
# Of a folder never more than `_PIECE` bytes are in memory beside the module that is written. Where Transformers would
# do more with the stored weights than rename, join, cut and transpose them, it does: the model is read as a whole
# first.

log = logging.getLogger(__name__)

_PIECE = 8 << 20


class WeightSource(Protocol):
    """The values of a model."""

    def fill(self, unit: Unit, first: int, out: Tensor) -> None:
        """Put a unit's bytes, from `first` on, into `out`, uint8: all of them, or whole rows of a table."""

    def stored(self, unit: Unit) -> None:
        """The unit lies in its tier."""

    def rest(self, units: list[Unit], device: torch.device) -> None:
        """Bring what no unit has to the device."""

    def close(self) -> None:
        """Let go of it."""


class ModelSource:
    """A model whose parameters have their values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def fill(self, unit: Unit, first: int, out: Tensor) -> None:
        """As `WeightSource`."""
        for part, a, b, target in _targets(unit, first, out):
            parameter = _parameter(part)
            target.copy_(parameter[a:b] if parameter.dim() else parameter)

    def stored(self, unit: Unit) -> None:
        """As `WeightSource`: the parameters' memory is given back, of stacks with the last expert's, and they stay."""
        if unit.expert is not None and unit.expert < unit.experts - 1:
            return
        for part in unit.parts:
            parameter = _parameter(part)
            parameter.data = torch.empty(0, dtype=part.dtype, device=parameter.device)

    def rest(self, units: list[Unit], device: torch.device) -> None:
        """As `WeightSource`."""
        away = {id(_parameter(part)) for unit in units for part in unit.parts}
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if id(tensor) not in away and tensor.device != device:
                tensor.data = tensor.data.to(device)

    def close(self) -> None:
        """As `WeightSource`."""


class FolderSource:
    """A model on the meta device, and the folder with its values."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """Raises CheckpointError for a folder that lacks a weight, or has one that has to be converted as a whole."""
        self._model, self._files = model, Folder(folder, pread=True)
        try:
            if has_float32_exceptions(model):
                raise CheckpointError(f"{folder}: some weights stay in float32")
            weights = FolderWeights(self._files, model)
            weights.refuse_untied()
            weights.log_unexpected()
            names = [name for name, _ in model.named_parameters()]
            if lacking := [name for name in names if name not in weights.sources]:
                raise CheckpointError(f"{folder}: no tensor {lacking[0]!r}")
            if not weights.read_in_slices(names):
                raise CheckpointError(f"{folder}: weights are converted as a whole")
            self._found: dict[str, Source] = weights.sources
        except BaseException:
            self.close()
            raise

    def fill(self, unit: Unit, first: int, out: Tensor) -> None:
        """As `WeightSource`."""
        for part, a, b, target in _targets(unit, first, out):
            _read(self._found[part.name], a, b, target)

    def stored(self, unit: Unit) -> None:
        """As `WeightSource`."""

    def rest(self, units: list[Unit], device: torch.device) -> None:
        """As `WeightSource`."""
        away = {part.name for unit in units for part in unit.parts}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in self._model.named_parameters():
            if name not in away:
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                _read(self._found[name], 0, len(value) if value.dim() else 0, value)
                parameters[id(parameter)] = nn.Parameter(value, requires_grad=False)
        buffers = {name for name, _ in self._model.named_buffers()}
        drawn = dict(initial_values(self._model, 0, buffers - self._found.keys()))
        for path, module in self._model.named_modules():
            for own, old in module._parameters.items():
                if old is not None and id(old) in parameters:
                    module._parameters[own] = parameters[id(old)]
            for own, buffer in module._buffers.items():
                if buffer is not None:
                    name = f"{path}.{own}" if path else own
                    source = self._found.get(name)
                    value = drawn[name] if source is None else source[(slice(None),) * buffer.dim()]
                    module._buffers[own] = value.to(device, buffer.dtype)

    def close(self) -> None:
        """As `WeightSource`."""
        self._files.__exit__()


def _targets(unit: Unit, first: int, out: Tensor) -> Iterator[tuple[Part, int, int, Tensor]]:
    """The weights that lie in a piece of a unit's bytes, with their first and last row, and where they go."""
    if unit.tables:
        part = unit.parts[0]
        a, rows = first // unit.row, out.numel() // unit.row
        yield part, a, a + rows, out.view(part.dtype).view(rows, *part.shape[1:])
        return
    for part in unit.parts:
        if part.expert is None:
            yield part, 0, part.shape[0] if part.shape else 0, part.view(out)
        else:
            yield part, part.expert, part.expert + 1, part.view(out).unsqueeze(0)


def _read(source: Source, first: int, last: int, target: Tensor) -> None:
    """Rows `first` to `last - 1` into `target`, some at a time."""
    if not target.dim():
        target.copy_(source[()])
        return
    row = max(target[0].nbytes if len(target) else 0, 1)
    step = max(_PIECE // row, 1)
    for at in range(first, last, step):
        end = min(at + step, last)
        target[at - first : end - first].copy_(source[(slice(at, end), *(slice(None),) * (target.dim() - 1))])


def _parameter(part: Part) -> Any:
    owner, own = part.owners[0]
    return owner._parameters[own]
