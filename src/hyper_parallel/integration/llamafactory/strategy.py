"""HyperParallelArguments as a Strategy.

    world = pp_size · replicate · fsdp_size · cp_size · tp_size
    fsdp_size left out: world ÷ (pp_size · cp_size · tp_size)
    efsdp_size · ep_size = fsdp_size · cp_size · tp_size

Only what is written goes into the Strategy; the trainer fills in the rest from LlamaFactory's own options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.compat import registry
from hyper_parallel.errors import IntegrationError, nearest
from hyper_parallel.integration.llamafactory.arguments import DTYPES, HyperParallelArguments
from hyper_parallel.integration.parallel_run import Given


def strategy_from_arguments(
    arguments: HyperParallelArguments, world: int, *, checkpoints: bool = False
) -> Given:
    """What to give `integration.parallel_run.strategy_of`: the user's own strategy, or one made of the fields.

    `checkpoints`: LlamaFactory's own gradient checkpointing is on, which holds where nothing here says otherwise.
    Raises IntegrationError for fields that are wrong, or that do not fit `world` workers.
    """
    arguments.validate()
    own = arguments.strategy
    if own is not None and own != "auto":
        return dict(own) if isinstance(own, Mapping) else Path(own)
    axes = "auto" if own == "auto" else _axes(arguments, world)
    return {"axes": axes, **_sections(arguments, checkpoints and own is None)}


def check_device(arguments: HyperParallelArguments, there: str) -> None:
    """Raise IntegrationError where `device_type` is not the device that the run trains on, or none at all."""
    meant = arguments.device_type
    known = ("auto", *registry.names())
    if meant not in known:
        hint = nearest(meant, known) or f"; known are {', '.join(known)}"
        raise IntegrationError(f"hyper_parallel_args: there is no device_type {meant!r}{hint}")
    if meant not in ("auto", there):
        raise IntegrationError(
            f"hyper_parallel_args: device_type is {meant!r}, and this run trains on {there!r}; install the driver and "
            f"the build of PyTorch for {meant}, or set device_type to 'auto'"
        )


def _axes(arguments: HyperParallelArguments, world: int) -> dict[str, int]:
    """Degrees, outer to inner. Raises IntegrationError where they do not multiply to `world`."""
    context, tensor, expert = arguments.cp_size, arguments.tp_size, arguments.ep_size
    stages = arguments.pp_size
    written = {"cp_size": context, "tp_size": tensor}
    if arguments.fsdp_size is not None:
        written = {"fsdp_size": arguments.fsdp_size, **written}
    written = {"pp_size": stages, **written}
    product = stages * context * tensor * (arguments.fsdp_size or 1)
    if world % product:
        sizes = " · ".join(f"{name} {size}" for name, size in written.items() if size > 1)
        raise IntegrationError(
            f"hyper_parallel_args: {sizes} = {product} does not divide the number of workers, {world}; start a "
            f"multiple of {product} workers, or make the sizes divide {world}"
        )
    rest = world // product
    shard = arguments.fsdp_size or rest
    axes = {
        "pipeline": stages,
        "replicate": world // (stages * shard * context * tensor),
        "shard": shard,
        "context": context,
        "tensor": tensor,
    }
    span = shard * context * tensor
    if span % expert:
        raise IntegrationError(
            f"hyper_parallel_args: ep_size {expert} does not divide fsdp_size · cp_size · tp_size = "
            f"{shard} · {context} · {tensor} = {span}; experts are spread over these workers"
        )
    if arguments.efsdp_size not in (None, span // expert):
        raise IntegrationError(
            f"hyper_parallel_args: efsdp_size is {arguments.efsdp_size}, and fsdp_size · cp_size · tp_size ÷ ep_size = "
            f"{shard} · {context} · {tensor} ÷ {expert} = {span // expert} workers share an expert; leave it out"
        )
    return {**axes, "expert": expert}


def _sections(arguments: HyperParallelArguments, checkpoints: bool) -> dict[str, Any]:
    """`precision` and `memory`, as far as they are written."""
    precision = {}
    if arguments.param_dtype is not None:
        precision["compute"] = DTYPES[arguments.param_dtype.removeprefix("torch.")]
    if arguments.reduce_dtype is not None:
        precision["reduce"] = DTYPES[arguments.reduce_dtype.removeprefix("torch.")]
    memory: dict[str, Any] = dict(arguments.memory or {})
    if arguments.reshard_after_forward is not None:
        memory["reshard_after_forward"] = arguments.reshard_after_forward
    own = arguments.activation_mode == "none" and arguments.memory is None and checkpoints
    if arguments.activation_mode == "recompute" or own:
        memory["recompute"] = "layer"
    return {**({"precision": precision} if precision else {}), **({"memory": memory} if memory else {})}
