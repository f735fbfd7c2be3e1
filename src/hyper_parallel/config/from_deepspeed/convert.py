"""Conversion of a DeepSpeed JSON: reading, the order of its sections, and those of `strategy`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.config.from_deepspeed.reasons import resembles
from hyper_parallel.config.from_deepspeed.source import Conversion, Source
from hyper_parallel.config.from_deepspeed.training import (
    convert_batch,
    convert_clipping,
    convert_logging,
    convert_optimizer,
    convert_precision,
    convert_schedule,
)
from hyper_parallel.errors import ConfigError
from hyper_parallel.units import exact_bytes
from hyper_parallel.untrusted import open_regular, parse_json, read_bytes

LARGEST = 2**20
"""Upper limit for the bytes of a DeepSpeed JSON."""


def read(path: str | Path) -> dict[str, Any]:
    """The object in a DeepSpeed JSON. Raises ConfigError, also where a key stands twice."""
    try:
        data = read_bytes(open_regular(path), LARGEST)
        content = parse_json(data)
        if not isinstance(content, dict):
            raise ValueError(f"must be an object, as in {{...}}; got a {type(content).__name__}")
        return dict(json.loads(data, object_pairs_hook=_once))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the JSON of deepspeed --deepspeed_config") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object; remove one")
    return found


def convert(
    content: Mapping[str, Any],
    *,
    devices: int | None = None,
    device_memory: int | None = None,
    host_memory: int | None = None,
    arguments: Sequence[str] = (),
    name: str = "ds_config.json",
) -> Conversion:
    """The fragment of a run file that trains as a DeepSpeed JSON says.

    `devices`: number of devices, for the degrees of axes and the global batch. `device_memory`, `host_memory`: bytes of
    the budget where the JSON offloads. `arguments`: training arguments of Transformers as ``name=value``, which fill
    `auto`. `name`: the file, for messages. Raises ConfigError for a value that DeepSpeed would refuse, too.
    """
    if content and not any(resembles(key) for key in content):
        found = ", ".join(map(repr, list(content)[:4]))
        raise ConfigError(
            f"{name}: is no DeepSpeed JSON: it has none of its keys, such as zero_optimization (it has {found}); give "
            "the file of deepspeed --deepspeed_config"
        )
    source = Source(content, name, arguments)
    data = convert_axes(source, devices)
    convert_batch(source, data)
    convert_optimizer(source)
    convert_schedule(source)
    convert_clipping(source)
    convert_precision(source)
    convert_offload(source, device_memory, host_memory)
    convert_recomputation(source)
    convert_overlap(source)
    convert_logging(source)
    keys = ("train.batch", "train.steps", "train.optimizer", "train.schedule")
    missing = ("version", "out", "model", "data", *(key for key in keys if not source.wrote(key)))
    return Conversion(
        name=name, settings=source.settings(), unconverted=source.unconverted(), missing=missing
    )


_STAGE = "zero_optimization.stage"
_LEVELS = {1: "optimizer", 2: "gradients", 3: "parameters"}
_TENSOR, _CONTEXT = "tensor_parallel.autotp_size", "sequence_parallel_size"
_MICS = "zero_optimization.mics_shard_size"
_LAST = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def convert_axes(source: Source, devices: int | None) -> int | None:
    """Writes `strategy.axes`. Returns the number of ranks that see different rows; None where it is not known."""
    stage = zero_stage(source)
    tensor, context = source.whole(_TENSOR) or 1, source.whole(_CONTEXT) or 1
    data = _data_ranks(source, devices, tensor * context)
    origin = f"--devices {devices}" if devices is not None else "by the three batch keys"
    note = (
        f"{data} data ranks ({origin})"
        if data
        else "auto: the planner chooses for the workers; --devices N writes it"
    )
    axes, group = "strategy.axes", source.whole(_MICS, least=-1) or -1
    if stage == 3 and group > 0:
        if data is not None and data % group:
            raise source.error(_MICS, f"must divide the {data} data ranks", group)
        source.write(f"{axes}.replicate", data // group if data else "auto", _MICS, note=note)
        source.write(f"{axes}.shard", group, _MICS, note="MiCS is hybrid sharding (HSDP)")
    else:
        if source.value(_MICS) is not None:
            source.leave(_MICS, "no group of its own: strategy.axes.shard is all data ranks")
        name, value = "shard" if stage else "replicate", data or "auto"
        source.write(f"{axes}.{name}", value, note=f"ZeRO stage {stage}; {note}")
    if source.value(_CONTEXT) is not None and not source.is_auto(_CONTEXT):
        source.write(f"{axes}.context", context, _CONTEXT)
        if context > 1:
            source.write("strategy.context.method", "ulysses", _CONTEXT, note="auto would choose by heads")
    if source.value(_TENSOR) is not None and not source.is_auto(_TENSOR):
        source.write(f"{axes}.tensor", tensor, _TENSOR)
    for key in (_CONTEXT, _TENSOR):
        if source.is_auto(key):
            source.leave(key, "'auto' is no degree; write it in strategy.axes")
    _experts(source, stage, data, tensor * context)
    if stage:
        keys = (_STAGE,) if isinstance(source.value("zero_optimization"), dict) else ("zero_optimization",)
        source.write("strategy.memory.shard", _LEVELS[stage], *keys, note=f"ZeRO-{stage}")
    elif source.value("zero_optimization") is False:
        source.leave("zero_optimization", "no ZeRO: strategy.axes.replicate")
    else:
        source.leave(_STAGE, "no ZeRO: strategy.axes.replicate")
    return data


def zero_stage(source: Source) -> int:
    """The ZeRO stage, 0 to 3."""
    zero = source.value("zero_optimization")
    if isinstance(zero, bool):  # DeepSpeed's first format
        return int(zero)
    stage = source.whole(_STAGE, least=0)
    if source.is_auto(_STAGE) or (stage or 0) > 3:
        raise source.error(_STAGE, "must be 0, 1, 2 or 3", source.value(_STAGE))
    return stage or 0


def _data_ranks(source: Source, devices: int | None, others: int) -> int | None:
    batch, micro, accumulation = (source.whole(key) for key in _LAST)
    if devices is not None:
        if devices % others:
            raise ConfigError(
                f"--devices {devices}: {source.name} splits the model and its sequences over {others} devices "
                f"({_TENSOR}, {_CONTEXT}); give a multiple of {others}"
            )
        return devices // others
    if batch and micro and accumulation and batch % (micro * accumulation) == 0:
        return batch // (micro * accumulation)
    return None


def _experts(source: Source, stage: int, data: int | None, others: int) -> None:
    key = "expert_parallel.autoep_size"
    size = source.whole(key)
    if size is None or not source.flag("expert_parallel.enabled"):
        return
    if not stage and size > 1:
        source.leave(
            key, "experts fold over strategy.axes.shard, which ZeRO stage 0 leaves at 1; use stage 1"
        )
    elif data is not None and data * others % size:
        source.leave(key, f"{size} does not divide the {data * others} ranks of shard, context and tensor")
    else:
        source.write("strategy.axes.expert", size, key, "expert_parallel.enabled", note="adds no ranks")


def convert_offload(source: Source, device: int | None, host: int | None) -> None:
    """Writes the budget in `strategy.memory`. `device`, `host`: bytes of each, from the command line."""
    zero = "zero_optimization"
    places = _places(source, zero_stage(source))
    if not places:
        if device is not None or host is not None:
            raise ConfigError(
                f"--device-memory, --host-memory: {source.name} offloads nothing; leave them out"
            )
        return
    if device is None:
        if host is not None:
            raise ConfigError(
                "--host-memory: give --device-memory too, the bytes that a step may hold on a device"
            )
        source.write(
            "strategy.memory.device",
            "auto",
            *places,
            note="the planner chooses the budgets, or none where everything fits; --device-memory sets one",
        )
        return
    folders = [f"{zero}.{name}.nvme_path" for name in ("offload_optimizer", "offload_param")]
    nvme = [key for key, place in places.items() if place == "nvme"]
    folder = next((f for f in folders if source.text(f) and f.replace("nvme_path", "device") in nvme), None)
    if host is None and ("cpu" in places.values() or folder is None):
        raise ConfigError(
            f"{source.name} offloads to the host's memory: give --host-memory too, the bytes of each rank"
        )
    if folder is not None and not (source.text(folder) or "").isprintable():
        raise source.error(folder, "must be a path of printable characters", source.text(folder))
    source.write("strategy.memory.device", exact_bytes(device), *places, note="--device-memory")
    if host is not None:
        source.write("strategy.memory.host", exact_bytes(host), note="--host-memory, for each rank")
    if folder is not None:
        used = [f for f in folders if source.text(f) == source.text(folder)]
        source.write("strategy.memory.flash", source.text(folder), *used)
    optimizer = next((key for key in places if "optimizer" in key or key.endswith("cpu_offload")), None)
    if optimizer is not None and places[optimizer] == "cpu":
        source.write("strategy.memory.update", "host", optimizer, note="the update runs where its state lies")


def _places(source: Source, stage: int) -> dict[str, str]:
    """Dotted key to `cpu` or `nvme`, for each kind of offload that is in effect."""
    places: dict[str, str] = {}
    for name, legacy, least in (
        ("offload_optimizer", "cpu_offload", 1),
        ("offload_param", "cpu_offload_param", 3),
    ):
        key = f"zero_optimization.{name}.device"
        place = source.text(key)
        if place not in (None, "none", "cpu", "nvme"):
            raise source.error(key, "must be none, cpu or nvme", place)
        old = f"zero_optimization.{legacy}"
        if place is None and source.flag(old):
            key, place = old, "cpu"
        if place == "none":
            source.leave(key, "nothing is offloaded: there is no budget in strategy.memory")
        elif place is not None and stage < least:
            source.leave(key, f"DeepSpeed offloads this from ZeRO stage {least} on")
        elif place is not None:
            places[key] = place
    for name in ("offload_optimizer", "offload_param"):
        path = f"zero_optimization.{name}.nvme_path"
        if source.value(path) is not None:
            source.leave(
                path,
                "with an offload to nvme and --device-memory it is strategy.memory.flash",
            )
    return places


def convert_recomputation(source: Source) -> None:
    """Writes `strategy.memory.recompute`: the section says how activations are checkpointed, so some are."""
    section = "activation_checkpointing"
    keys = [
        f"{section}.{name}"
        for name in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
        if source.flag(f"{section}.{name}")
    ]
    if source.whole(f"{section}.number_checkpoints"):
        keys.append(f"{section}.number_checkpoints")
    if source.given("gradient_checkpointing"):
        source.write("strategy.memory.recompute", "layer", *keys, note="gradient_checkpointing=true")
    elif keys:
        source.write(
            "strategy.memory.recompute",
            "layer",
            *keys,
            note="every layer's input stays on the device, unless a budget moves it",
        )


def convert_overlap(source: Source) -> None:
    """Writes `strategy.overlap.schedule`."""
    key = "zero_optimization.overlap_comm"
    overlaps = source.flag(key)
    if overlaps is not None:
        source.write("strategy.overlap.schedule", "auto" if overlaps else "none", key)
    elif source.is_auto(key):
        source.leave(key, "strategy.overlap.schedule: auto is the default")
