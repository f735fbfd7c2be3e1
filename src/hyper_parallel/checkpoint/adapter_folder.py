"""The LoRA adapters of a checkpoint as PEFT's folder: ``adapter_config.json`` and ``adapter_model.safetensors``.

    W' = W + s B A, s = alpha / r, or alpha / √r with rslora        arXiv 2106.09685, section 4.1; 2312.03732

The base model's weights are not in it. Nothing here imports peft.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint import stream
from hyper_parallel.checkpoint.durable import check_new, new_folder, write_file
from hyper_parallel.checkpoint.merged_adapters import MAGNITUDE, MODEL, PEFT, STATE, read_whole
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.errors import CheckpointError
from hyper_parallel.hub.hub_id import parse_explicit

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
    yield stream.header(
        {name: (saved[name].dtype, tuple(saved[name].shape)) for name in order}, {"format": "pt"}
    )
    for name in order:
        yield stream.raw(read_whole(source, names[name]))


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
