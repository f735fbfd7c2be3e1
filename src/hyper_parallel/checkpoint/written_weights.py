"""A checkpoint's weights under the names, and in the shapes, that Transformers' `save_pretrained` writes them.

A checkpoint has the names of the module. Of many families the folder has others: one tensor for each expert, or parts
under older names (`compat.hf_conversions`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from hyper_parallel.checkpoint.merged_adapters import MODEL, ModelTensors
from hyper_parallel.compat.hf_conversions import blank_model, saving, shared_names
from hyper_parallel.compat.traced_tensors import TracedTensor, traced
from hyper_parallel.errors import CheckpointError

log = logging.getLogger(__name__)

_TIED = "tie_word_embeddings"


def named_as_transformers(
    tensors: ModelTensors, config: dict[str, Any]
) -> tuple[dict[str, TracedTensor], dict[str, Any]]:
    """The weights by their names in a folder, computed from the checkpoint as they are read, and the folder's config.

    Weights that the config ties and that have values of their own in the checkpoint, or an adapter, are not tied, and
    the config says so. Weights of another module than Transformers' of this config keep their names.

    Raises CheckpointError for adapters of another module, whose weights are not known by name.
    """
    names = _names(tensors)
    model = blank_model(config, names)
    if tensors.tied or _has_untied(model, names):
        model, config = _untied(tensors, model, config)
        names = _names(tensors)
    if model is None:
        if tensors.merged:
            raise CheckpointError(
                f"{tensors.path} holds adapters, and its config is of no model of Transformers with weights such as "
                f"{min(names, default='')!r}; save the model with merge_and_unload().save_pretrained"
            )
        if names:
            log.warning(
                "%s: no model of Transformers has this config and these weights; they keep the names of the module, "
                "such as %r",
                tensors.path,
                min(names),
            )
        return {name: _leaf(tensors, name) for name in names}, config
    leaves = {name: _leaf(tensors, name) for name in names}
    for name, group in shared_names(model).items():
        leaves.setdefault(name, next(leaves[other] for other in sorted(group) if other in leaves))
    return saving(model, leaves), {**config, "architectures": [type(model).__name__]}


def _has_untied(model: nn.Module | None, names: list[str]) -> bool:
    """Whether a checkpoint has several of the names of a weight."""
    groups = {} if model is None else shared_names(model)
    return any(len(group.intersection(names)) > 1 for group in groups.values())


def _untied(
    tensors: ModelTensors, model: nn.Module | None, config: dict[str, Any]
) -> tuple[nn.Module | None, dict[str, Any]]:
    """The model in which no weights are tied, and its config."""
    groups = {} if model is None else shared_names(model)
    for name in tensors.tied:
        group = groups.get(name.removeprefix(MODEL), frozenset())
        other = next((other for other in sorted(group) if f"{MODEL}{other}" in tensors.saved), None)
        if other is None:
            raise CheckpointError(
                f"{tensors.path} holds an adapter of {name.removeprefix(MODEL)!r} and not that weight; save the model "
                "with merge_and_unload().save_pretrained"
            )
        tensors.untie(name, f"{MODEL}{other}")
    config = {**_without_ties(config), _TIED: False}
    return blank_model(config, _names(tensors)), config


def _without_ties(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: False if key == _TIED else _without_ties(value) for key, value in config.items()}


def _names(tensors: ModelTensors) -> list[str]:
    return [name.removeprefix(MODEL) for name in tensors.saved]


def _leaf(tensors: ModelTensors, name: str) -> TracedTensor:
    saved = tensors.saved[f"{MODEL}{name}"]
    return traced(_Saved(tensors, f"{MODEL}{name}"), saved.shape, saved.dtype)


class _Saved:
    """A weight of the checkpoint, which is read as a whole."""

    def __init__(self, tensors: ModelTensors, name: str) -> None:
        self._tensors, self._name = tensors, name

    def __getitem__(self, slices: tuple[slice, ...], /) -> torch.Tensor:
        return self._tensors.whole(self._name)[slices]
