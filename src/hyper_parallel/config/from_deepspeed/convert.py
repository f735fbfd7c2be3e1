"""Conversion of a DeepSpeed JSON, section by section of the run file.

Most keys are one key of a run file (tables in `keys`); what is arithmetic is here: the three keys of the batch, degrees
of axes, the budget of an offload, dtypes, and the warm-up against the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.config.from_deepspeed.keys import (
    DTYPES,
    OPTIMIZER_ARGUMENTS,
    OPTIMIZERS,
    SCHEDULES,
    resembles,
)
from hyper_parallel.config.from_deepspeed.source import DEFAULT, Conversion, Source, joined
from hyper_parallel.errors import ConfigError
from hyper_parallel.units import exact_bytes

_ZERO, _STAGE = "zero_optimization", "zero_optimization.stage"
_LEVELS = {1: "optimizer", 2: "gradients", 3: "parameters"}
_TENSOR, _CONTEXT = "tensor_parallel.autotp_size", "sequence_parallel_size"
_MICS = "zero_optimization.mics_shard_size"
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_PARAMS, _SCHEDULE, _PEAK = "optimizer.params", "scheduler.params", "scheduler.params.warmup_max_lr"


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
        keys = ", ".join(map(repr, list(content)[:4]))
        raise ConfigError(
            f"{name}: is no DeepSpeed JSON: it has none of its keys, such as zero_optimization (it has {keys}); "
            "give the file of deepspeed --deepspeed_config"
        )
    source = Source(content, name, arguments)
    stage = _zero_stage(source)
    ranks = _convert_axes(source, stage, devices)
    _convert_batch(source, ranks)
    _convert_optimizer(source)
    _convert_schedule(source)
    clip, note = source.origin("gradient_clipping", source.number, "max_grad_norm")
    if source.value("gradient_clipping") is None:  # we clip by default
        note = "DeepSpeed does not clip without gradient_clipping"
    source.write("train.clip", clip or None, "gradient_clipping", note=note)
    _convert_precision(source)
    _convert_offload(source, stage, device_memory, host_memory)
    _convert_recomputation(source)
    overlap = "zero_optimization.overlap_comm"
    if (overlaps := source.flag(overlap)) is not None:
        source.write("strategy.overlap.schedule", "auto" if overlaps else "none", overlap)
    if trackers := [name for name in ("tensorboard", "wandb") if source.flag(f"{name}.enabled")]:
        source.write("trackers", trackers, *(f"{name}.enabled" for name in trackers))
    required = ("train.batch", "train.steps", "train.optimizer", "train.schedule")
    missing = ("version", "out", "model", "data", *(key for key in required if not source.wrote(key)))
    return Conversion(
        name=name, settings=source.settings(), unconverted=source.unconverted(), missing=missing
    )


def _zero_stage(source: Source) -> int:
    zero = source.value(_ZERO)
    if isinstance(zero, bool):  # DeepSpeed's first format
        return int(zero)
    stage = source.whole(_STAGE, least=0)
    if source.is_auto(_STAGE) or (stage or 0) > 3:
        raise source.error(_STAGE, "must be 0, 1, 2 or 3", source.value(_STAGE))
    return stage or 0


def _convert_axes(source: Source, stage: int, devices: int | None) -> int | None:
    """Writes `strategy.axes`. Returns the number of ranks that see different rows; None where it is not known."""
    tensor, context = source.whole(_TENSOR) or 1, source.whole(_CONTEXT) or 1
    ranks = _data_ranks(source, devices, tensor * context)
    note = "auto: the planner chooses for the workers; --devices N writes it"
    if ranks:
        origin = "by the three batch keys" if devices is None else f"--devices {devices}"
        note = f"{ranks} data ranks ({origin})"
    axes, group = "strategy.axes", source.whole(_MICS, least=-1) or -1
    if stage == 3 and group > 0:
        if ranks is not None and ranks % group:
            raise source.error(_MICS, f"must divide the {ranks} data ranks", group)
        source.write(f"{axes}.replicate", ranks // group if ranks else "auto", _MICS, note=note)
        source.write(f"{axes}.shard", group, _MICS, note="MiCS is hybrid sharding (HSDP)")
    else:
        name = "shard" if stage else "replicate"
        source.write(f"{axes}.{name}", ranks or "auto", note=f"ZeRO stage {stage}; {note}")
    for name, key, degree in (("context", _CONTEXT, context), ("tensor", _TENSOR, tensor)):
        if source.value(key) is not None and not source.is_auto(key):
            source.write(f"{axes}.{name}", degree, key)
    if context > 1:
        source.write("strategy.context.method", "ulysses", _CONTEXT, note="auto would choose by heads")
    _convert_experts(source, stage, ranks, tensor * context)
    if stage:
        key = _ZERO if source.value(_ZERO) is True else _STAGE
        source.write("strategy.memory.shard", _LEVELS[stage], key, note=f"ZeRO-{stage}")
    return ranks


def _data_ranks(source: Source, devices: int | None, others: int) -> int | None:
    batch, micro, accumulation = (source.whole(key) for key in (_BATCH, _MICRO, _STEPS))
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


def _convert_experts(source: Source, stage: int, ranks: int | None, others: int) -> None:
    key = "expert_parallel.autoep_size"
    size = source.whole(key)
    if size is None or not source.flag("expert_parallel.enabled"):
        return
    if not stage and size > 1:
        shard = "strategy.axes.shard, which ZeRO stage 0 leaves at 1; use stage 1"
        source.leave(key, f"experts fold over {shard}")
    elif ranks is not None and ranks * others % size:
        source.leave(key, f"{size} does not divide the {ranks * others} ranks of shard, context and tensor")
    else:
        source.write("strategy.axes.expert", size, key, "expert_parallel.enabled", note="adds no ranks")


def _convert_batch(source: Source, ranks: int | None) -> None:
    """Writes `train.batch` and `train.micro_batch`. `ranks`: those that see different rows."""
    batch = source.whole(_BATCH)
    micro, note = _rows(source, _MICRO, "per_device_train_batch_size")
    steps, _ = _rows(source, _STEPS, "gradient_accumulation_steps")
    product = None if ranks is None or micro is None else micro * (steps or 1) * ranks
    if batch is None:
        batch, batch_note = product, f"times {ranks} data ranks"
    else:
        batch_note = ""
        if ranks is not None and micro is not None and steps is not None and batch != product:
            needed = f"must be {micro} · {steps} · {ranks} data ranks = {product}; --devices says how many"
            raise source.error(_BATCH, needed, batch)
        if ranks is not None and batch % (ranks * (micro or 1) * (steps or 1)):
            needed = f"must be a multiple of {ranks * (micro or 1) * (steps or 1)} ({ranks} data ranks)"
            raise source.error(_BATCH, needed, batch)
        if ranks is not None and micro is None and steps is not None:
            micro, note = batch // (ranks * steps), f"{_BATCH} / ({_STEPS} · {ranks} data ranks)"
    if batch is None:
        for key in (_BATCH, _MICRO, _STEPS):
            why = "train.batch is that of all ranks: it follows from the micro-batch and --devices"
            source.leave(key, why)
        return
    source.write("train.batch", batch, _BATCH, _MICRO, _STEPS, note=batch_note)
    if micro is not None and batch % micro == 0:
        source.write("train.micro_batch", micro, _MICRO, _STEPS, note=note)


def _rows(source: Source, key: str, argument: str) -> tuple[int | None, str]:
    batch = source.whole(_BATCH)
    if source.is_auto(key) and batch is not None and source.given(argument) is None:
        return None, ""  # a default of Transformers could only contradict the batch
    return source.origin(key, source.whole, argument)


def _convert_optimizer(source: Source) -> None:
    """Writes `train.optimizer` for AdamW, for Adam with decoupled decay, and for Lion."""
    name = source.text("optimizer.type")
    peak, peak_note = _scheduler_peak(source)
    if (why := _no_counterpart(source, name)) is not None:
        source.leave_kind("optimizer", why)
        if name is not None:
            source.leave(_PEAK, "a rate of that optimizer; train.optimizer.lr is the peak of this one")
        elif peak is not None:
            source.write("train.optimizer.lr", peak, _PEAK, note=peak_note)
        return
    assert name is not None
    keys = ["optimizer.type"]
    if name.lower() == "lion":
        optimizer, note = "lion", ""
    else:
        optimizer = "adamw"
        keys.append(f"{_PARAMS}.adam_w_mode")
        note = "" if name == "AdamW" else "decay is decoupled, as in DeepSpeed's Adam by default"
    source.write("train.optimizer.name", optimizer, *keys, note=note)
    for parameter, default in OPTIMIZERS[optimizer].items():
        key, target = f"{_PARAMS}.{parameter}", f"train.optimizer.{parameter}"
        read = source.value if parameter == "betas" else source.number
        value, note = source.origin(key, read, *OPTIMIZER_ARGUMENTS[parameter], default=default)
        if parameter == "betas":
            pair = isinstance(value, list) and len(value) == 2
            if not pair or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in value):
                raise source.error(key, "must be two numbers from 0 to below 1, or auto", value)
        if parameter == "lr" and peak is not None:
            source.write(target, peak, _PEAK, key, note=peak_note)
        elif parameter in ("lr", "eps") and value == 0:
            source.leave(key, "must be above 0 here")
        else:
            # A peak that is `auto` is filled with the same argument as the rate.
            keys = [key, _PEAK] if parameter == "lr" and source.is_auto(_PEAK) else [key]
            decays = "norms and biases are not decayed" if parameter == "weight_decay" else ""
            source.write(target, value, *keys, note=joined(note, decays))


def _no_counterpart(source: Source, name: str | None) -> str | None:
    """Why an optimizer has no counterpart; None for AdamW and Lion."""
    if not name:
        return "'type' is missing, and no optimizer is built without it"
    if name.lower() == "muon":
        return "updates are scaled differently by train.optimizer: {name: muon}; write it there (docs/training.md)"
    if name.lower() not in ("adam", "adamw", "lion"):
        ours = "adamw, adamw_8bit, lion, adafactor or muon"
        return f"no counterpart: train.optimizer is {ours}, or one that you register (docs/training.md)"
    if source.flag(f"{_PARAMS}.adam_w_mode") is False and name.lower() == "adam":
        return "no counterpart: Adam with decay in the gradient; train.optimizer is AdamW"
    return None


def _scheduler_peak(source: Source) -> tuple[float | None, str]:
    """The scheduler's peak, which replaces the optimizer's learning rate; None where the optimizer's applies."""
    kind = source.text("scheduler.type")
    if kind not in ("WarmupLR", "WarmupDecayLR") or source.is_auto(_PEAK):
        return None, ""
    peak, default = source.number(_PEAK), ""
    if not peak:
        # WarmupDecayLR has its own peak even where nobody wrote one.
        peak, default = 1e-3 if kind == "WarmupDecayLR" else None, f", {DEFAULT}"
    return peak, f"the peak of the scheduler{default}, replaces the optimizer's rate"


def _convert_schedule(source: Source) -> None:
    """Writes `train.schedule` and `train.steps`."""
    name = source.text("scheduler.type")
    if name not in SCHEDULES:
        why = (
            "'type' is missing, and no schedule is built without it"
            if name is None
            else "no counterpart: train.schedule is cosine, linear, constant or wsd, after a linear warm-up"
        )
        source.leave_kind("scheduler", why)
        return
    source.write("train.schedule.name", SCHEDULES[name], "scheduler.type")
    _convert_warmup(source, _total_steps(source, name))
    if name == "WarmupDecayLR":
        source.write("train.schedule.floor", 0.0, "scheduler.type", note="it decays to 0")
    if name == "WarmupCosineLR":
        key = f"{_SCHEDULE}.cos_min_ratio"
        floor, note = source.origin(key, source.number, default=0.0001)
        if floor is not None and floor > 1:
            raise source.error(key, "must be from 0 to 1", floor)
        source.write("train.schedule.floor", floor, key, note=note)
    for key in (f"{_SCHEDULE}.warmup_min_lr", f"{_SCHEDULE}.warmup_min_ratio"):
        begin = "warm-up always begins at 0"
        zero = source.is_auto(key) or not source.number(key)
        source.leave(key, begin if zero else f"no counterpart: {begin}, and not here")


def _total_steps(source: Source, name: str) -> int | None:
    key = f"{_SCHEDULE}.total_num_steps"
    if source.is_auto(key):
        steps: int | None = source.given("max_steps")
        if steps is None:
            source.leave(key, "Transformers computes it from epochs; set train.steps, or give max_steps=N")
        else:
            source.write("train.steps", steps, key, note=f"filled with max_steps={steps}")
        return steps
    total = source.whole(key)
    if total is not None and name != "WarmupLR":
        source.write("train.steps", total, key)
    return total


def _convert_warmup(source: Source, total: int | None) -> None:
    key, kind = f"{_SCHEDULE}.warmup_num_steps", f"{_SCHEDULE}.warmup_type"
    linear = source.text(kind) == "linear"
    steps, note = source.origin(key, lambda key: source.whole(key, least=0), "warmup_steps", default=1000)
    if steps and not linear:
        note = joined(note, "linear here, logarithmic in DeepSpeed")
        source.leave(kind, "no counterpart: warm-up is linear")
    if total is not None and steps > total:
        source.leave(key, f"{steps} steps of warm-up do not fit into {total} steps")
        source.write("train.schedule.warmup", 0, note=f"see {key} below")
        return
    if total is None and steps > 100:
        note = joined(note, "train.steps must be as many or more")
    source.write("train.schedule.warmup", steps, key, *([kind] if linear else []), note=note)


def _convert_precision(source: Source) -> None:
    """Writes `strategy.precision`; float16 becomes bfloat16."""
    bf16, bf16_note = source.origin("bf16.enabled", source.flag, "bf16")
    fp16, fp16_note = source.origin("fp16.enabled", source.flag, "fp16")
    if bf16 and fp16:
        raise source.error("fp16.enabled", "must not be true together with bf16.enabled", True)
    key = "communication_data_type"
    reduce = source.text(key)
    if reduce is not None and reduce not in DTYPES:
        raise source.error(key, f"must be one of {', '.join(DTYPES)}", reduce)
    precision = "strategy.precision"
    if bf16:
        source.write(f"{precision}.compute", "bfloat16", "bf16.enabled", note=bf16_note)
    elif fp16:
        note = joined("float16 becomes bfloat16, which needs no loss scaling", fp16_note)
        source.write(f"{precision}.compute", "bfloat16", "fp16.enabled", note=note)
    elif bf16 is not None or fp16 is not None:
        note = joined(bf16_note, fp16_note)
        source.write(f"{precision}.compute", "float32", "bf16.enabled", "fp16.enabled", note=note)
    if bf16 or fp16:
        _convert_master(source)
    if reduce is not None:
        note = "float16 becomes bfloat16" if reduce in ("fp16", "float16") else ""
        source.write(f"{precision}.reduce", DTYPES[reduce], key, note=note)
    elif bf16 or fp16:
        source.write(f"{precision}.reduce", "bfloat16", key, note="DeepSpeed reduces in the compute dtype")


def _convert_master(source: Source) -> None:
    param = "strategy.precision.param"
    weights, states = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    if source.flag(weights) and source.flag(states):
        source.write(param, "bfloat16", weights, states)
        return
    if source.flag(weights):
        source.leave(weights, "no counterpart: parameters and optimizer state share a dtype, precision.param")
    source.write(param, "float32", note="master weights and optimizer state, as in DeepSpeed")


def _convert_offload(source: Source, stage: int, device: int | None, host: int | None) -> None:
    """Writes the budget in `strategy.memory`. `device`, `host`: bytes of each, from the command line."""
    places = _offload_places(source, stage)
    if not places:
        if device is not None or host is not None:
            options = "--device-memory, --host-memory"
            raise ConfigError(f"{options}: {source.name} offloads nothing; leave them out")
        return
    memory = "strategy.memory"
    if device is None:
        if host is not None:
            raise ConfigError(
                "--host-memory: give --device-memory too, the bytes that a step may hold on a device"
            )
        note = "the planner chooses the budgets, or none where everything fits; --device-memory sets one"
        source.write(f"{memory}.device", "auto", *places, note=note)
        return
    paths = [f"{_ZERO}.{name}.nvme_path" for name in ("offload_optimizer", "offload_param")]
    folders = {path: source.text(path) for path in paths}
    nvme = [key.replace("device", "nvme_path") for key, place in places.items() if place == "nvme"]
    flash = next((path for path, folder in folders.items() if path in nvme and folder), None)
    if host is None and ("cpu" in places.values() or flash is None):
        raise ConfigError(
            f"{source.name} offloads to the host's memory: give --host-memory too, the bytes of each rank"
        )
    folder = folders[flash] if flash is not None else None
    if flash is not None and folder is not None and not folder.isprintable():
        raise source.error(flash, "must be a path of printable characters", folder)
    source.write(f"{memory}.device", exact_bytes(device), *places, note="--device-memory")
    if host is not None:
        source.write(f"{memory}.host", exact_bytes(host), note="--host-memory, for each rank")
    if folder is not None:
        source.write(f"{memory}.flash", folder, *(path for path in paths if folders[path] == folder))
    optimizer = next((key for key in places if "optimizer" in key or key.endswith("cpu_offload")), None)
    if optimizer is not None and places[optimizer] == "cpu":
        source.write(f"{memory}.update", "host", optimizer, note="the update runs where its state lies")


def _offload_places(source: Source, stage: int) -> dict[str, str]:
    """Dotted key to `cpu` or `nvme`, for each kind of offload that is in effect."""
    places: dict[str, str] = {}
    for name, legacy, least in (
        ("offload_optimizer", "cpu_offload", 1),
        ("offload_param", "cpu_offload_param", 3),
    ):
        key = f"{_ZERO}.{name}.device"
        place = source.text(key)
        if place not in (None, "none", "cpu", "nvme"):
            raise source.error(key, "must be none, cpu or nvme", place)
        if place is None and source.flag(f"{_ZERO}.{legacy}"):
            key, place = f"{_ZERO}.{legacy}", "cpu"
        if place == "none":
            source.leave(key, "nothing is offloaded: there is no budget in strategy.memory")
        elif place is not None and stage < least:
            source.leave(key, f"DeepSpeed offloads this from ZeRO stage {least} on")
        elif place is not None:
            places[key] = place
    return places


def _convert_recomputation(source: Source) -> None:
    """Writes `strategy.memory.recompute`: the section says how activations are checkpointed, so some are."""
    section = "activation_checkpointing"
    flags = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
    keys = [f"{section}.{name}" for name in flags if source.flag(f"{section}.{name}")]
    if source.whole(f"{section}.number_checkpoints"):
        keys.append(f"{section}.number_checkpoints")
    argument = source.given("gradient_checkpointing")
    note = "every layer's input stays on the device, unless a budget moves it"
    if argument:
        note = "gradient_checkpointing=true"
    if keys or argument:
        source.write("strategy.memory.recompute", "layer", *keys, note=note)
