"""Exports a checkpoint as a plain Hugging Face folder, a tensor at a time, under the names that Transformers writes."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.checkpoint import file_format
from hyper_parallel.checkpoint.adapters import MODEL, ModelTensors
from hyper_parallel.checkpoint.durable import check_new, new_folder, write_file
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.checkpoint.shard import dtype_name
from hyper_parallel.compat.hf_conversions import blank_model, saving, shared_names
from hyper_parallel.compat.traced_tensors import SliceReader, TracedTensor, traced
from hyper_parallel.errors import CheckpointError

log = logging.getLogger(__name__)

_ORIGINS = ("_name_or_path", "name_or_path", "tokenizer_file", "vocab_file", "special_tokens_map_file")
_CONFIGS = ("_config.json", "special_tokens_map.json")


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write the model of the checkpoint at `checkpoint` to the new folder `out`; its path.

    `out` gets ``config.json`` (``state["model_config"]``, with the written dtype), the checkpoint's assets (tokenizer
    files, ``generation_config.json``) without any names of local folders, and ``model.safetensors``, split into several
    files with an index above `shard_bytes`. LoRA adapters that a run trained are merged into the weights.
    Names and shapes are those of Transformers' ``save_pretrained``, and ``AutoModelForCausalLM.from_pretrained(out)``
    loads it. Floating-point tensors are written as they were saved, or as `dtype`. One weight at a time is in memory,
    with its adapter and what it is converted to; every byte is verified.

    Raises CheckpointError if the checkpoint is damaged or was saved without the model's config, if `out`
    exists and is not an empty folder, or if it cannot be written; no partial folder is left.
    """
    source, target = Checkpoint(Path(checkpoint)), Path(out).absolute()
    check_new(target)
    config = source.state.get("model_config")
    if source.state.get("adapters"):
        raise CheckpointError(
            f"{source.path} holds adapters and no base model; PeftModel.from_pretrained loads the folder around it, "
            f"{source.path.parent}"
        )
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{source.path} holds no model config, so that no config.json can be written; save it as "
            "state['model_config'] (config.to_dict())"
        )
    written, config = named_as_transformers(ModelTensors(source), without_origin(config))
    if file_format.METADATA in written:
        raise CheckpointError(
            f"{source.path} holds a tensor that is called {file_format.METADATA!r}, as no file can name one"
        )
    if not written:
        raise CheckpointError(f"{source.path} holds no tensor whose name begins with {MODEL!r}")
    kinds = {
        name: dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        for name, tensor in written.items()
    }
    floating = {kind for kind in kinds.values() if kind.is_floating_point}
    files = {name: _without_origin(name, source.asset(name)) for name in source.assets}
    if "config.json" in files or any(name.startswith("model") and "safetensors" in name for name in files):
        raise CheckpointError(
            f"{source.path} has assets that the exported model would overwrite: {sorted(files)}"
        )
    if config.get("auto_map"):
        log.warning("%s: its config names custom code (auto_map), which is left out", source.path)
        config = {key: value for key, value in config.items() if key != "auto_map"}
    if len(floating) == 1:  # Transformers loads in the type that the config names
        config = {**config, "dtype": dtype_name(floating.pop())}
        config.pop("torch_dtype", None)
    files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    with new_folder(target) as partial:
        shards = _shards(written, kinds, shard_bytes)
        if len(shards) > 1:
            files["model.safetensors.index.json"] = _index(written, kinds, shards)
        for file, data in files.items():
            write_file(partial / file, [data])
        for file, names in shards.items():
            write_file(partial / file, _chunks(written, kinds, names))
    return target


def without_origin(config: Any) -> Any:
    """A config without the keys in which Transformers records its origin, at any depth."""
    if isinstance(config, dict):
        return {key: without_origin(value) for key, value in config.items() if key not in _ORIGINS}
    return [without_origin(one) for one in config] if isinstance(config, list) else config


def _without_origin(name: str, data: bytes) -> bytes:
    """The same for a file; a file without such keys keeps its bytes."""
    if not name.endswith(_CONFIGS) or not any(key.encode() in data for key in _ORIGINS):
        return data
    try:
        return (json.dumps(without_origin(json.loads(data)), indent=2, ensure_ascii=False) + "\n").encode()
    except ValueError:  # it is the user's file as it was
        return data


def _bytes(tensor: TracedTensor, kind: torch.dtype) -> int:
    return math.prod(tensor.shape) * kind.itemsize


def _shards(
    written: dict[str, TracedTensor], kinds: dict[str, torch.dtype], limit: int
) -> dict[str, list[str]]:
    """File name to its tensors; each file has at most `limit` bytes, unless a single tensor is larger."""
    groups: list[list[str]] = [[]]
    room = limit
    for name in kinds:
        size = _bytes(written[name], kinds[name])
        if size > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    for group in groups:
        group.sort(key=lambda name: -kinds[name].itemsize)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _index(
    written: dict[str, TracedTensor], kinds: dict[str, torch.dtype], shards: dict[str, list[str]]
) -> bytes:
    total = sum(_bytes(written[name], kinds[name]) for name in kinds)
    where = {name: file for file, group in shards.items() for name in group}
    body = {"metadata": {"total_size": total}, "weight_map": where}
    return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()


def _chunks(
    written: dict[str, TracedTensor], kinds: dict[str, torch.dtype], names: list[str]
) -> Iterator[bytes | memoryview]:
    yield file_format.header(
        {name: (kinds[name], tuple(written[name].shape)) for name in names}, {"format": "pt"}
    )
    for name in names:
        yield file_format.raw(SliceReader().whole(written[name]).to(kinds[name]))


# A checkpoint's weights under the names, and in the shapes, that Transformers' `save_pretrained` writes them.
#
# A checkpoint has the names of the module. Of many families the folder has others: one tensor for each expert, or parts
# under older names (`compat.hf_conversions`).

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
