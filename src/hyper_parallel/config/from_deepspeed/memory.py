"""Offload, recomputation and overlap: sections `strategy.memory` and `strategy.overlap`."""

from __future__ import annotations

from hyper_parallel.config.from_deepspeed.parallelism import zero_stage
from hyper_parallel.config.from_deepspeed.source import Source
from hyper_parallel.errors import ConfigError
from hyper_parallel.units import exact_bytes


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
