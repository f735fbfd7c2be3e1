"""Where weights come from before they lie in tiers: a model in memory, or a Transformers folder read row by row.

Of a folder never more than `_PIECE` bytes are in memory beside the module that is written. Where Transformers would do
more with the stored weights than rename, join, cut and transpose them, it does: the model is read as a whole first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hyper_parallel.compat.hf_conversions import has_float32_exceptions
from hyper_parallel.compat.traced_tensors import Source
from hyper_parallel.errors import CheckpointError
from hyper_parallel.inference.weights.units import Part, Unit
from hyper_parallel.shard.folder_weights import FolderWeights
from hyper_parallel.shard.load_weights import initial_values
from hyper_parallel.shard.safetensors_folder import Folder

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
        made: dict[int, nn.Parameter] = {}
        for name, parameter in self._model.named_parameters():
            if name not in away:
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                _read(self._found[name], 0, len(value) if value.dim() else 0, value)
                made[id(parameter)] = nn.Parameter(value, requires_grad=False)
        buffers = {name for name, _ in self._model.named_buffers()}
        drawn = dict(initial_values(self._model, 0, buffers - self._found.keys()))
        for path, module in self._model.named_modules():
            for own, old in module._parameters.items():
                if old is not None and id(old) in made:
                    module._parameters[own] = made[id(old)]
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
