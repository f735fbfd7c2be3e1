"""A folder's weights by the names of a model: which stored tensors each is computed from, and slices of it.

The names, shapes and conversions are those of Transformers (`compat.hf_conversions`); a module that is not
Transformers' has its own names in the folder. Nothing is left out in silence: what the model needs and the folder lacks
is an error, what the folder has and the model does not take is listed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from hyper_parallel.compat import hf_conversions
from hyper_parallel.compat.hf_conversions import Loading, shared_names
from hyper_parallel.compat.local_tensor import one_device
from hyper_parallel.compat.traced_tensors import (
    SliceReader,
    Source,
    TracedTensor,
    is_sliced,
    sources_of,
    traced,
)
from hyper_parallel.errors import CheckpointError
from hyper_parallel.shard.lora_adapters import adapted_layers, base_of, name_in_base, without_adapters
from hyper_parallel.shard.model_structure import is_transformers
from hyper_parallel.shard.safetensors_folder import Folder, StoredTensor

log = logging.getLogger(__name__)

_SHOWN = 4
_COMPARED = 4 << 20
"""Elements that are compared at a time."""


class FolderWeights:
    """The weights of a model in a folder, by the model's names.

    A name that `sources` lacks has values that the model computes itself: buffers that are not saved, weights of
    adapters, and those whose absence the model's class allows.
    """

    def __init__(self, files: Folder, model: nn.Module) -> None:
        """`model`: on the meta device, with adapters or without. Raises CheckpointError where the folder lacks a
        weight, or has it in another shape or in a type that is no weight's."""
        self.folder = files.folder
        self._reader = SliceReader()
        with one_device():
            plain = _without_layers(model)
            loading = _loading(plain, files)
            self._tensors = dict(loading.tensors)
            groups = shared_names(plain)
            self._check(loading, plain, groups, files.names())
            for tensor in loading.tensors.values():
                for source in sources_of(tensor):
                    assert isinstance(source, StoredTensor)
                    source.check()
            self.unexpected = loading.unexpected
            self.untied = self._untied_pair(groups)
        for name in groups:
            stored = next((other for other in sorted(groups[name]) if other in loading.tensors), None)
            if stored is not None:
                self._tensors.setdefault(name, loading.tensors[stored])
        state = (*model.named_parameters(), *model.named_buffers())
        places = {name: name_in_base(name, model) for name, _ in state}
        self.sources: dict[str, Source] = {
            name: self._reader.of(self._tensors[place])
            for name, place in places.items()
            if place is not None and place in self._tensors
        }

    def read_in_slices(self, names: Collection[str]) -> bool:
        """Whether a slice of these weights is read without the rest."""
        return all(is_sliced(self._tensors[name]) for name in names)

    def refuse_untied(self) -> None:
        """Raise CheckpointError where two weights that the model ties have values of their own in the folder."""
        if self.untied is not None:
            raise CheckpointError(
                f"{self.folder}: {self.untied[0]!r} and {self.untied[1]!r} have different values there, and the model "
                "ties them; build it with tie_word_embeddings=False in its config, as Transformers reads the folder"
            )

    def log_unexpected(self) -> None:
        """Say in one line which tensors of the folder the model does not take."""
        if self.unexpected:
            log.warning(
                "%s: not taken, since the model has no such weights: %s",
                self.folder,
                _listed(self.unexpected),
            )

    def _check(
        self, loading: Loading, model: nn.Module, groups: dict[str, frozenset[str]], stored: Collection[str]
    ) -> None:
        missing = [
            name for name in groups if name in loading.missing and groups[name].isdisjoint(loading.tensors)
        ]
        for name, shape in sorted(loading.shapes.items()):
            needed = tuple(model.state_dict()[name].shape)
            lacking = _lacking(model, name, stored)
            if lacking and len(shape) == len(needed):
                raise CheckpointError(_no_tensor(self.folder, lacking, name))
            raise CheckpointError(
                f"{self.folder}: {name!r} has shape {list(shape)}, the model needs {list(needed)}"
            )
        for name, error in sorted(loading.errors.items()):
            if lacking := _lacking(model, name, stored):
                raise CheckpointError(_no_tensor(self.folder, lacking, name))
            reason = " ".join(error.strip().splitlines()[-1:])[:200]
            raise CheckpointError(f"{self.folder}: {name!r} cannot be computed from what is there: {reason}")
        if missing:
            lacking = _lacking(model, missing[0], stored) or [missing[0]]
            raise CheckpointError(_no_tensor(self.folder, lacking, missing[0], len(missing) - 1))

    def _untied_pair(self, groups: dict[str, frozenset[str]]) -> tuple[str, str] | None:
        """Two names of one weight under which the folder has different values."""
        for name, group in groups.items():
            present = sorted(group & self._tensors.keys())
            for other in present[1:]:
                if name == present[0] and not self._same(self._tensors[name], self._tensors[other]):
                    return name, other
        return None

    def _same(self, first: TracedTensor, second: TracedTensor) -> bool:
        if first.shape != second.shape:
            return False
        a, b = self._reader.of(first), self._reader.of(second)
        if not first.dim():
            return torch.equal(a[()], b[()])
        step = max(_COMPARED // max(first[0].numel(), 1), 1)
        pieces = (slice(at, at + step) for at in range(0, first.shape[0], step))
        return all(torch.equal(a[(rows,)], b[(rows,)]) for rows in pieces)


def has_untied_weights(folder: str | Path, model: nn.Module) -> bool:
    """Whether a folder has different values for weights that a model on the meta device ties.

    A folder that cannot be read has none: reading the weights says what is wrong with it.
    """
    if all(len(group) == 1 for group in shared_names(model).values()):
        return False
    try:
        with Folder(Path(folder)) as files:
            return FolderWeights(files, model).untied is not None
    except CheckpointError:
        return False


def _loading(model: nn.Module, files: Folder) -> Loading:
    stored = {name: _traced(files.stored(name)) for name in sorted(files.names())}
    if is_transformers(model):
        return hf_conversions.loading(model, stored)
    state = model.state_dict()
    shapes = {
        name: tuple(stored[name].shape)
        for name in state.keys() & stored.keys()
        if stored[name].shape != state[name].shape
    }
    return Loading(
        {name: stored[name] for name in state if name in stored},
        frozenset(state.keys() - stored.keys()),
        tuple(sorted(stored.keys() - state.keys())),
        shapes,
        {},
    )


def _traced(tensor: StoredTensor) -> TracedTensor:
    try:
        return traced(tensor, tensor.shape, tensor.dtype)
    except RuntimeError as error:  # a shape that no tensor can have
        raise CheckpointError(f"{tensor.name!r:.80} has a shape that no tensor has: {error}") from None


def _without_layers(model: nn.Module) -> nn.Module:
    """A copy of the model without the layers that peft put around its modules."""
    plain = copy.deepcopy(without_adapters(model))
    for name, layer in list(adapted_layers(plain)):
        plain.set_submodule(name, base_of(layer))
    return plain


def _lacking(model: nn.Module, name: str, stored: Collection[str]) -> list[str]:
    """The tensors that Transformers would write for a weight, and that the folder lacks."""
    if not is_transformers(model):
        return []
    place = {key: _Place(key) for key in model.state_dict()}
    try:
        written = hf_conversions.saving(
            model, {key: traced(place[key], t.shape, t.dtype) for key, t in model.state_dict().items()}
        )
    except CheckpointError:
        return []
    return [key for key, tensor in written.items() if place[name] in sources_of(tensor) and key not in stored]


class _Place:
    """A weight without values."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, slices: tuple[slice, ...], /) -> torch.Tensor:
        raise AssertionError(f"{self.name} has no values")


def _no_tensor(folder: Path, lacking: list[str], name: str, others: int = 0) -> str:
    needed = "" if lacking == [name] else f", which {name!r} is made of"
    more = f", and {others} other weights are missing" if others else ""
    return (
        f"{folder}: no tensor {lacking[0]!r}{needed}{more}; the folder holds another model's weights, or not all of "
        "this one's"
    )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
