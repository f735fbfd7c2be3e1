"""Exports a checkpoint as a plain Hugging Face folder, one tensor at a time."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.checkpoint import stream
from hyper_parallel.checkpoint.durable import check_new, new_folder, write_file
from hyper_parallel.checkpoint.merged_adapters import MODEL, ModelTensors
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.checkpoint.shard import dtype_name
from hyper_parallel.checkpoint.written_weights import named_as_transformers
from hyper_parallel.compat.traced_tensors import SliceReader, TracedTensor
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
    if stream.METADATA in written:
        raise CheckpointError(
            f"{source.path} holds a tensor that is called {stream.METADATA!r}, as no file can name one"
        )
    if not written:
        raise CheckpointError(f"{source.path} holds no tensor whose name begins with {MODEL!r}")
    kinds = {name: _kind(tensor.dtype, dtype) for name, tensor in written.items()}
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


def _kind(saved: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and saved.is_floating_point else saved


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
    yield stream.header({name: (kinds[name], tuple(written[name].shape)) for name in names}, {"format": "pt"})
    for name in names:
        yield stream.raw(SliceReader().whole(written[name]).to(kinds[name]))
