"""Axes and ZeRO level: `strategy.axes` and `strategy.memory.shard`."""

from __future__ import annotations

from hyper_parallel.config.from_deepspeed.source import Source
from hyper_parallel.errors import ConfigError

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
