"""LoRA adapters of a checkpoint: merged into the model's weights, or written as PEFT's folder.

    W' = W + s B A                       arXiv 2106.09685, section 4.1; s is the adapter's scale, and B A is transposed
                                         where a layer keeps its weight as [in, out]
    W' = m (W + s B A) / ‖W + s B A‖     DoRA, arXiv 2402.09353: m and the norm are of each output feature

`merge_state` is what a run with adapters writes into its checkpoints, beside the tensors, for this.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel.checkpoint import file_format
from hyper_parallel.checkpoint.durable import check_new, new_folder, write_file
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.checkpoint.shard import Piece
from hyper_parallel.errors import CheckpointError
from hyper_parallel.hub.hub_id import parse_explicit
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


def merged_weight(
    value: torch.Tensor, change: torch.Tensor, magnitude: torch.Tensor | None = None, *, across: bool = False
) -> torch.Tensor:
    """A layer's weight with its adapter, in the dtype of `value`. `change`: s B A as the layer keeps its weight;
    `magnitude`: DoRA's, [out], for which `value` is whole; `across`: the weight is [in, out]."""
    merged = value.float() + change.float()
    if magnitude is not None:
        factor = magnitude.float() / torch.linalg.norm(merged, dim=0 if across else 1)
        merged = merged * (factor if across else factor.unsqueeze(1))
    return merged.to(value.dtype)


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
        name = f"{layer}{MAGNITUDE}default.weight"
        magnitude = self._read(name) if name in self._source.tensors else None
        return merged_weight(value, change.mT if across else change, magnitude, across=across)

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


# The LoRA adapters of a checkpoint as PEFT's folder: ``adapter_config.json`` and ``adapter_model.safetensors``.
#
#     W' = W + s B A, s = alpha / r, or alpha / √r with rslora        arXiv 2106.09685, section 4.1; 2312.03732
#
# The base model's weights are not in it. Nothing here imports peft.

log = logging.getLogger(__name__)


def export_adapter(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the adapters of the checkpoint at `checkpoint` to the new folder `out`; its path.

    ``PeftModel.from_pretrained(base, out)`` loads it, where `base` is the model that the run began with. Values are
    written in the dtype that they were saved in. ``base_model_name_or_path`` is the run's `model.path`: a folder by its
    absolute path where it is here, an id of the Hugging Face Hub with its revision; of a run that began with new
    weights it is null.

    Raises CheckpointError if the checkpoint has no LoRA adapters of a run file's kind, or is damaged, or if `out`
    exists and is not an empty folder, or cannot be written; no partial folder is left.
    """
    source, target = Checkpoint(Path(checkpoint)), Path(out).absolute()
    check_new(target)
    if source.state.get("adapters"):
        raise CheckpointError(
            f"{source.path} is in a folder of PEFT already; PeftModel.from_pretrained loads the folder around it, "
            f"{source.path.parent}"
        )
    state = source.state.get(STATE)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{source.path} holds no LoRA adapters; leave --adapter out, and export writes the whole model"
        )
    layers = {layer: float(scale) for layer, scale in state["scales"].items()}
    names = {
        f"{layer}.lora_{factor}.weight": f"{MODEL}{layer}.lora_{factor}.default.weight"
        for layer in layers
        for factor in "AB"
    }
    for layer in layers:
        if (origin := f"{MODEL}{layer}{MAGNITUDE}default.weight") in source.tensors:
            names[f"{layer}{MAGNITUDE.rstrip('.')}"] = origin
    config = _config(source, layers, fan_in_fan_out=bool(state["transposed"]))
    with new_folder(target) as partial:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        write_file(partial / "adapter_config.json", [text.encode()])
        write_file(partial / "adapter_model.safetensors", _chunks(source, names))
    return target


def _chunks(source: Checkpoint, names: dict[str, str]) -> Iterator[bytes | memoryview]:
    saved = {name: source.tensors[origin] for name, origin in names.items()}
    order = sorted(names, key=lambda name: -saved[name].dtype.itemsize)
    yield file_format.header(
        {name: (saved[name].dtype, tuple(saved[name].shape)) for name in order}, {"format": "pt"}
    )
    for name in order:
        yield file_format.raw(read_whole(source, names[name]))


def _config(source: Checkpoint, layers: dict[str, float], *, fan_in_fan_out: bool) -> dict[str, Any]:
    run = source.state.get("config")
    model = run.get("model", {}) if isinstance(run, dict) else {}
    declared = model.get("adapter") or {}
    rslora = bool(declared.get("rslora", False))
    ranks = {layer: source.tensors[f"{MODEL}{layer}.lora_A.default.weight"].shape[0] for layer in layers}
    alphas = {
        layer: _number(scale * (math.sqrt(ranks[layer]) if rslora else ranks[layer]))
        for layer, scale in layers.items()
    }
    rank, alpha = _usual(ranks), _usual(alphas)
    base, revision = _base(model.get("path"))
    if base is None:
        log.warning(
            "%s: the run began with new weights, which no folder has; the adapters need that base model (export "
            "without --adapter writes one model with them)",
            source.path,
        )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": float(declared.get("dropout", 0.0)),
        "use_rslora": rslora,
        "use_dora": any(MAGNITUDE in name for name in source.tensors),
        "target_modules": _targets(source, list(layers)),
        "rank_pattern": {_plain(one): r for one, r in ranks.items() if r != rank},
        "alpha_pattern": {_plain(one): a for one, a in alphas.items() if a != alpha},
        "fan_in_fan_out": fan_in_fan_out,
        "bias": "none",
        "inference_mode": True,
    }


def _targets(source: Checkpoint, layers: list[str]) -> list[str]:
    """The adapted layers by the last parts of their names, as PEFT writes them; by whole names where another module
    ends alike."""
    ends = {layer.rpartition(".")[2] for layer in layers}
    adapted = set(layers)
    for name in source.tensors:
        module = name.removeprefix(MODEL).rpartition(".")[0].removesuffix(".base_layer")
        owner = module.partition(".lora_")[0]
        if name.startswith(f"{MODEL}{PEFT}") and owner not in adapted and owner.rpartition(".")[2] in ends:
            return sorted(map(_plain, layers))
    return sorted(ends)


def _plain(layer: str) -> str:
    return layer.removeprefix(PEFT)


def _usual(values: dict[str, Any]) -> Any:
    return Counter(values.values()).most_common(1)[0][0]


def _number(alpha: float) -> float | int:
    """A whole number where it is one but for rounding."""
    whole = round(alpha)
    return whole if math.isclose(alpha, whole, rel_tol=1e-9) else alpha


def _base(path: str | None) -> tuple[str | None, str | None]:
    """``base_model_name_or_path`` and ``revision`` of a run's `model.path`."""
    if path is None:
        return None, None
    found = parse_explicit(path, "model.path")
    if found is not None:
        return found.name, found.revision
    there = Path(path).expanduser()
    return (str(there.absolute()) if there.is_dir() else path), None
