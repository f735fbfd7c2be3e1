"""Conversion of what belongs to `train`: batch, optimizer, learning rate, clipping; and of dtypes and trackers."""

from __future__ import annotations

from typing import Any

from hyper_parallel.config.from_deepspeed.source import Source

_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_REDUCE = "communication_data_type"
_HALF, _REDUCES = "float16 becomes bfloat16", "DeepSpeed reduces in the compute dtype"
_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfp16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "bfloat16",
    "float16": "bfloat16",
}


def convert_batch(source: Source, data: int | None) -> None:
    """Writes `train.batch` and `train.micro_batch`. `data`: ranks that see different rows."""
    batch, (micro, note), (steps, _) = source.whole(_BATCH), _rows(source, _MICRO), _rows(source, _STEPS)
    product = None if data is None or micro is None else micro * (steps or 1) * data
    if batch is not None and data is not None:
        if micro is not None and steps is not None and batch != product:
            raise source.error(
                _BATCH,
                f"must be {micro} · {steps} · {data} data ranks = {product}; --devices says how many",
                batch,
            )
        if batch % (data * (micro or 1) * (steps or 1)):
            raise source.error(
                _BATCH,
                f"must be a multiple of {data * (micro or 1) * (steps or 1)} ({data} data ranks)",
                batch,
            )
        if micro is None and steps is not None:
            micro, note = batch // (data * steps), f"{_BATCH} / ({_STEPS} · {data} data ranks)"
    if batch is None:
        batch = product
    if batch is None:
        for key in (_BATCH, _MICRO, _STEPS):
            source.leave(
                key, "train.batch is that of all ranks: it follows from the micro-batch and --devices"
            )
        return
    note_batch = "" if source.whole(_BATCH) else f"times {data} data ranks"
    source.write("train.batch", batch, _BATCH, _MICRO, _STEPS, note=note_batch)
    if micro is not None and batch % micro == 0:
        source.write("train.micro_batch", micro, _MICRO, _STEPS, note=note)


def _rows(source: Source, key: str) -> tuple[int | None, str]:
    if not source.is_auto(key):
        return source.whole(key), ""
    if source.whole(_BATCH) is not None:
        # The batch is known; a default of Transformers could only contradict it.
        argument = {_MICRO: "per_device_train_batch_size", _STEPS: "gradient_accumulation_steps"}[key]
        given = source.given(argument)
        return given, f"filled with {argument}={given}" if given else ""
    return source.filled({_MICRO: "per_device_train_batch_size", _STEPS: "gradient_accumulation_steps"}[key])


def convert_clipping(source: Source) -> None:
    """Writes `train.clip`. DeepSpeed does not clip where the key is left out; we do."""
    key = "gradient_clipping"
    value, note = source.number(key), ""
    if source.is_auto(key):
        value, note = source.filled("max_grad_norm")
    elif value is None:
        note = "DeepSpeed does not clip without gradient_clipping"
    source.write("train.clip", value or None, key, note=note)


def convert_precision(source: Source) -> None:
    """Writes `strategy.precision`; float16 becomes bfloat16."""
    (brain, said), (half, said_half) = _enabled(source, "bf16"), _enabled(source, "fp16")
    if brain and half:
        raise source.error("fp16.enabled", "must not be true together with bf16.enabled", True)
    reduced = source.text(_REDUCE)
    if reduced is not None and reduced not in _DTYPES:
        raise source.error(_REDUCE, f"must be one of {', '.join(_DTYPES)}", reduced)
    precision = "strategy.precision"
    if brain or half:
        half_note = "; ".join(
            one for one in ("float16 becomes bfloat16, which needs no loss scaling", said_half) if one
        )
        note = said if brain else half_note
        source.write(
            f"{precision}.compute", "bfloat16", "bf16.enabled" if brain else "fp16.enabled", note=note
        )
        _master(source)
        note = _REDUCES if reduced is None else _HALF if reduced in ("fp16", "float16") else ""
        source.write(f"{precision}.reduce", _DTYPES[reduced or "bf16"], _REDUCE, note=note)
    elif brain is not None or half is not None:
        note = "; ".join(dict.fromkeys(part for part in (said, said_half) if part))
        source.write(f"{precision}.compute", "float32", "bf16.enabled", "fp16.enabled", note=note)
    if reduced and not source.wrote(f"{precision}.reduce"):
        note = _HALF if reduced in ("fp16", "float16") else ""
        source.write(f"{precision}.reduce", _DTYPES[reduced], _REDUCE, note=note)


def _enabled(source: Source, argument: str) -> tuple[bool | None, str]:
    key = f"{argument}.enabled"
    if source.is_auto(key):
        value: Any
        value, note = source.filled(argument)
        return value, note
    return source.flag(key), ""


def _master(source: Source) -> None:
    weights, states = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    if source.flag(weights) and source.flag(states):
        source.write("strategy.precision.param", "bfloat16", weights, states)
        return
    if source.flag(weights):
        source.leave(weights, "no counterpart: parameters and optimizer state share a dtype, precision.param")
    source.write(
        "strategy.precision.param", "float32", note="master weights and optimizer state, as in DeepSpeed"
    )


def convert_logging(source: Source) -> None:
    """Writes `trackers`."""
    names = [name for name in ("tensorboard", "wandb") if source.flag(f"{name}.enabled")]
    if names:
        source.write("trackers", names, *(f"{name}.enabled" for name in names))


def convert_optimizer(source: Source) -> None:
    """Writes `train.optimizer` for AdamW, for Adam with decoupled decay, and for Lion."""
    key, params = "optimizer.type", "optimizer.params"
    name = source.text(key)
    peak = _peak(source)
    if (why := _no_counterpart(source, name)) is not None:
        for one in (key, *(f"{params}.{inner}" for inner in source.section(params) if "." not in inner)):
            source.leave(one, why)
        if peak is not None and name is None:
            source.write("train.optimizer.lr", peak, _PEAK, note=_origin(source))
        elif name is not None:
            source.leave(_PEAK, "a rate of that optimizer; train.optimizer.lr is the peak of this one")
        return
    if name is not None and name.lower() == "lion":
        _convert_lion(source, peak)
        return
    decoupled = "" if name == "AdamW" else "decay is decoupled, as in DeepSpeed's Adam by default"
    source.write("train.optimizer.name", "adamw", key, "optimizer.params.adam_w_mode", note=decoupled)
    _learning_rate(source, peak)
    _betas(source)
    for ours, argument, default, more in (
        ("eps", "adam_epsilon", 1e-8, ""),
        ("weight_decay", "weight_decay", 0.0, "norms and biases are not decayed"),
    ):
        value, note = _filled(source, f"{params}.{ours}", argument, default)
        if ours == "eps" and value <= 0:
            source.leave(f"{params}.eps", "must be above 0 here")
            continue
        note = "; ".join(part for part in (note, more) if part)
        source.write(f"train.optimizer.{ours}", value, f"{params}.{ours}", note=note)


def _convert_lion(source: Source, peak: float | None) -> None:
    source.write("train.optimizer.name", "lion", "optimizer.type")
    _learning_rate(source, peak, default=1e-4)
    _betas(source, default=(0.9, 0.99))
    key = "optimizer.params.weight_decay"
    value, note = _filled(source, key, "weight_decay", 0.0)
    note = "; ".join(part for part in (note, "norms and biases are not decayed") if part)
    source.write("train.optimizer.weight_decay", value, key, note=note)


def _no_counterpart(source: Source, name: str | None) -> str | None:
    """Why an optimizer has no counterpart; None for AdamW and Lion."""
    known = name.lower() if name else None
    if known is None:
        return "'type' is missing, and no optimizer is built without it"
    if known == "muon":
        return "updates are scaled differently by train.optimizer: {name: muon}; write it there (docs/training.md)"
    if known not in ("adam", "adamw", "lion"):
        return (
            "no counterpart: train.optimizer is adamw, adamw_8bit, lion, adafactor or muon, or one that you register "
            "(docs/training.md)"
        )
    decoupled = source.flag("optimizer.params.adam_w_mode")
    if known == "adam" and decoupled is False:
        return "no counterpart: Adam with decay in the gradient; train.optimizer is AdamW"
    return None


_PEAK = "scheduler.params.warmup_max_lr"


def _peak(source: Source) -> float | None:
    """The scheduler's peak, which replaces the optimizer's learning rate; None where the optimizer's applies."""
    kind = source.text("scheduler.type")
    if kind not in ("WarmupLR", "WarmupDecayLR") or source.is_auto(_PEAK):
        return None
    # WarmupDecayLR has a peak of its own even where nobody wrote one.
    return source.number(_PEAK) or (1e-3 if kind == "WarmupDecayLR" else None)


def _origin(source: Source) -> str:
    default = "" if source.number(_PEAK) else ", DeepSpeed's default"
    return f"the peak of the scheduler{default}, replaces the optimizer's rate"


def _learning_rate(source: Source, peak: float | None, default: float = 1e-3) -> None:
    own = "optimizer.params.lr"
    value, note = _filled(source, own, "learning_rate", default)
    if peak is not None:
        source.write("train.optimizer.lr", peak, _PEAK, own, note=_origin(source))
    elif value <= 0:
        source.leave(own, "must be above 0 here")
    elif source.is_auto(_PEAK):
        source.write("train.optimizer.lr", value, own, _PEAK, note=note)
    else:
        source.write("train.optimizer.lr", value, own, note=note)


def _betas(source: Source, default: tuple[float, float] = (0.9, 0.999)) -> None:
    key = "optimizer.params.betas"
    found = source.value(key)
    note = "DeepSpeed's default" if found is None else ""
    if found == "auto":
        (first, note), (second, _) = source.filled("adam_beta1"), source.filled("adam_beta2")
        found = [first, second]
    found = list(default) if found is None else found
    right = isinstance(found, list) and len(found) == 2
    if not right or not all(type(one) in (int, float) and 0 <= one < 1 for one in found):
        raise source.error(key, "must be two numbers from 0 to below 1, or auto", found)
    source.write("train.optimizer.betas", found, key, note=note)


def _filled(source: Source, key: str, argument: str, default: float) -> tuple[float, str]:
    """The value of a key, with its origin where the file does not say it."""
    if source.is_auto(key):
        return source.filled(argument)
    found = source.number(key)
    return (default, "DeepSpeed's default") if found is None else (found, "")


_SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def convert_schedule(source: Source) -> None:
    """Writes `train.schedule` and `train.steps`."""
    key, params = "scheduler.type", "scheduler.params"
    name = source.text(key)
    if name not in _SHAPES:
        why = (
            "'type' is missing, and no schedule is built without it"
            if name is None
            else "no counterpart: train.schedule is cosine, linear, constant or wsd, after a linear warm-up"
        )
        for one in (key, *(f"{params}.{inner}" for inner in source.section(params) if "." not in inner)):
            source.leave(one, why)
        return
    source.write("train.schedule.name", _SHAPES[name], key)
    total = _total(source, name)
    _warmup(source, total)
    if name == "WarmupDecayLR":
        source.write("train.schedule.floor", 0.0, key, note="it decays to 0")
    if name == "WarmupCosineLR":
        floor = source.number(f"{params}.cos_min_ratio")
        if floor is not None and floor > 1:
            raise source.error(f"{params}.cos_min_ratio", "must be from 0 to 1", floor)
        note = "" if floor is not None else "DeepSpeed's default"
        source.write(
            "train.schedule.floor", 0.0001 if floor is None else floor, f"{params}.cos_min_ratio", note=note
        )
    for one in (f"{params}.warmup_min_lr", f"{params}.warmup_min_ratio"):
        if source.is_auto(one) or not source.number(one):
            source.leave(one, "warm-up always begins at 0")
        else:
            source.leave(one, "no counterpart: warm-up always begins at 0, and not here")


def _total(source: Source, name: str) -> int | None:
    key = "scheduler.params.total_num_steps"
    if source.is_auto(key):
        given: int | None = source.given("max_steps")
        if given is None:
            source.leave(key, "Transformers computes it from epochs; set train.steps, or give max_steps=N")
        else:
            source.write("train.steps", given, key, note=f"filled with max_steps={given}")
        return given
    total = source.whole(key)
    if total is not None and name != "WarmupLR":
        source.write("train.steps", total, key)
    return total


def _warmup(source: Source, total: int | None) -> None:
    key, kind = "scheduler.params.warmup_num_steps", "scheduler.params.warmup_type"
    shape = source.text(kind)
    steps, note = source.filled("warmup_steps") if source.is_auto(key) else (source.whole(key, least=0), "")
    if steps is None:
        steps, note = 1000, "DeepSpeed's default"
    sources = [key]
    if shape == "linear":
        sources.append(kind)
    elif steps:
        note = "; ".join(part for part in (note, "linear here, logarithmic in DeepSpeed") if part)
        source.leave(kind, "no counterpart: warm-up is linear")
    if total is not None and steps > total:
        source.leave(key, f"{steps} steps of warm-up do not fit into {total} steps")
        source.write("train.schedule.warmup", 0, note="see scheduler.params.warmup_num_steps below")
        return
    if total is None and steps > 100:
        note = "; ".join(part for part in (note, "train.steps must be as many or more") if part)
    source.write("train.schedule.warmup", steps, *sources, note=note)
