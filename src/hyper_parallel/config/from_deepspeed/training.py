"""Batch, clipping, dtypes and trackers: sections `train`, `strategy.precision` and `trackers`."""

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
