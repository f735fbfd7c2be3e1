"""The model's tensors in a checkpoint as plain weights: as they were saved, or with LoRA adapters merged into them.

    W' = W + s B A                       arXiv 2106.09685, section 4.1; s is the adapter's scale, and B A is transposed
                                         where a layer keeps its weight as [in, out]
    W' = m (W + s B A) / ‖W + s B A‖     DoRA, arXiv 2402.09353: m and the norm are of each output feature

`merge_state` is what a run with adapters writes into its checkpoints, beside the tensors, for this.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.checkpoint.shard import Piece
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.units import format_bytes

MODEL = "model."
"""Prefix of the model's tensors in a checkpoint, before the parameter's name."""
STATE = "lora"
"""The key of a checkpoint's state under which `merge_state` is."""
PEFT = "base_model.model."
"""What peft puts before the name of a module of the model."""
MAGNITUDE = ".lora_magnitude_vector."
"""In the names of DoRA's magnitudes."""
_PEFT = f"{MODEL}{PEFT}"
_WHOLE = Mesh(("replicate", 1))


class SavedTensor(NamedTuple):
    """A tensor of the exported model."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def merge_state(model: nn.Module) -> dict[str, Any] | None:
    """How a model's adapters are merged: ``{"scales": {layer: s}, "transposed": [layer, ...]}`` by names in the model;
    None where it has none, or others than one adapter of LoRA or DoRA per layer."""
    scales: dict[str, float] = {}
    transposed: list[str] = []
    for name, module in model.named_modules():
        layer: Any = module
        if not hasattr(layer, "base_layer") or not hasattr(layer, "lora_A"):
            continue
        magnitudes = len(getattr(layer, "lora_magnitude_vector", ()))
        if list(layer.lora_A) != ["default"] or len(getattr(layer, "lora_variant", ())) != magnitudes:
            return None
        if layer.lora_bias.get("default", False):
            return None
        scales[name] = float(layer.scaling["default"])
        if layer.fan_in_fan_out:
            transposed.append(name)
    return {"scales": scales, "transposed": transposed} if scales else None


class ModelTensors:
    """The model's tensors of a checkpoint, by their names in the plain model with the prefix ``model.``.

    Raises CheckpointError where it holds adapters and does not say how they are merged.
    """

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        names = [name for name in source.tensors if name.startswith(MODEL)]
        self._origin = {name: name for name in names}
        self._layers: dict[str, str] = {}
        """Name of a weight to its layer of adapters, by the layer's name in the checkpoint."""
        self._scales: dict[str, float] = {}
        self._transposed: set[str] = set()
        self._last: tuple[str, torch.Tensor] | None = None
        if any(name.startswith(_PEFT) for name in names):
            self._merge(names)

    def _merge(self, names: list[str]) -> None:
        state = self._source.state.get(STATE)
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{self._source.path} holds adapters within their base model and does not say how they are merged; "
                "resume the run and let it write another checkpoint, or train inside Transformers' Trainer, whose "
                "save_model writes PEFT's folder (docs/transformers.md)"
            )
        self._scales = {f"{MODEL}{layer}": float(scale) for layer, scale in state["scales"].items()}
        self._transposed = {f"{MODEL}{layer}" for layer in state["transposed"]}
        self._origin = {}
        for name in names:
            if ".lora_A." in name or ".lora_B." in name or MAGNITUDE in name:
                continue
            self._origin[MODEL + name.removeprefix(_PEFT).replace(".base_layer.", ".")] = name
        self._layers = {f"{MODEL}{layer.removeprefix(_PEFT)}.weight": layer for layer in self._scales}

    @property
    def tied(self) -> list[str]:
        """Weights with adapters that are not in the checkpoint, since the model ties them to others that are."""
        return [name for name in self._layers if name not in self._origin]

    def untie(self, name: str, other: str) -> None:
        """Have a weight with adapters begin with the values of the one that it is tied to."""
        self._origin[name] = self._origin[other]

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self._source.path

    @property
    def merged(self) -> bool:
        """Whether adapters are merged."""
        return bool(self._layers)

    @property
    def saved(self) -> dict[str, SavedTensor]:
        """Name to dtype and shape."""
        found = {name: self._source.tensors[origin] for name, origin in self._origin.items()}
        return {name: SavedTensor(one.dtype, tuple(one.shape)) for name, one in found.items()}

    def whole(self, name: str) -> torch.Tensor:
        """A tensor's values, in the dtype that it was saved in. The last one is kept: experts in one tensor are written
        one after the other."""
        if self._last is None or self._last[0] != name:
            self._last = None  # before memory is taken for the next
            self._last = (name, self._merged(name))
        return self._last[1]

    def _merged(self, name: str) -> torch.Tensor:
        value = self._read(self._origin[name])
        if (layer := self._layers.get(name)) is None:
            return value
        a, b = (self._read(f"{layer}.lora_{factor}.default.weight").float() for factor in "AB")
        change = (b @ a) * self._scales[layer]
        across = layer in self._transposed
        merged = value.float() + (change.mT if across else change)
        if (magnitude := f"{layer}{MAGNITUDE}default.weight") in self._source.tensors:
            factor = self._read(magnitude).float() / torch.linalg.norm(merged, dim=0 if across else 1)
            merged = merged * (factor if across else factor.unsqueeze(1))
        return merged.to(value.dtype)

    def _read(self, name: str) -> torch.Tensor:
        return read_whole(self._source, name)


def read_whole(source: Checkpoint, name: str) -> torch.Tensor:
    """A tensor's values by its name in the checkpoint. Raises CheckpointError where memory does not suffice."""
    saved = source.tensors[name]
    try:
        whole = torch.empty(saved.shape, dtype=saved.dtype)
    except RuntimeError as error:
        size = format_bytes(math.prod(saved.shape) * saved.dtype.itemsize)
        raise CheckpointError(
            f"{source.path}: {name} has {size}, which this machine does not have"
        ) from error
    source.fill({name: Piece(whole, Layout.replicated(_WHOLE, tuple(saved.shape)))}, 0)
    return whole
