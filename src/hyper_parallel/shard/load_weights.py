"""Initial values of a model that was parallelized on the meta device: random, or from a folder.

No rank ever holds the whole model. New values are drawn one module at a time, each from a generator seeded by
(seed, module name), by the model's own initialisation, so that they are the same under any strategy; each rank keeps
its pieces. Saved ones are read piece by piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank
from hyper_parallel.compat.memory import filled, hollow
from hyper_parallel.compat.traced_tensors import Source
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.folder_weights import FolderWeights
from hyper_parallel.shard.lora_adapters import Magnitudes, initialise, is_magnitude, name_in_base
from hyper_parallel.shard.model_structure import is_transformers, names_of_parameters
from hyper_parallel.shard.reshard import fill_piece
from hyper_parallel.shard.safetensors_folder import Folder
from hyper_parallel.shard.sharded_model import ShardedModel, ShardedParameter, sharded


def init_weights(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Draw new values, the same under any strategy, into a model that was parallelized on the meta device."""
    handle = _emptied(model, device)
    skeleton = _skeleton(handle)
    magnitudes = Magnitudes(skeleton)
    for name, values in initial_values(skeleton, seed, elsewhere=_elsewhere(handle)):
        _fill(handle, name, values)
        for weight, norms in magnitudes.after(name, values):
            _fill(handle, weight, norms)


def load_weights(
    model: nn.Module, folder: str | Path, device: torch.device | str = "cpu", seed: int = 0
) -> None:
    """Read a Hugging Face folder's safetensors into a model that was parallelized on the meta device.

    The folder is that of the model without adapters; adapters get new values, drawn with `seed`.

    Raises CheckpointError when a tensor is missing, has another shape, or a file cannot be read.
    """
    handle = sharded(model)
    skeleton = _skeleton(handle)
    with Folder(Path(folder)) as files:
        weights = FolderWeights(files, skeleton)
        weights.refuse_untied()
        if handle.rank == 0:
            weights.log_unexpected()
        names = {name for name, _ in (*skeleton.named_parameters(), *skeleton.named_buffers())}
        drawn = names - weights.sources.keys()
        # Memory is taken for what fits to the folder.
        _emptied(model, device)
        magnitudes = Magnitudes(skeleton)
        for name, source in chain(weights.sources.items(), initial_values(skeleton, seed, drawn)):
            _fill(handle, name, source)
            for made, norms in magnitudes.after(name, source):
                _fill(handle, made, norms)


def fill_weights(
    model: nn.Module, values: Iterable[tuple[str, torch.Tensor]], device: torch.device | str = "cpu"
) -> None:
    """Take whole tensors, (name, values), into a model that was parallelized on the meta device; each is read once.

    Every parameter has to come; of buffers only those on the meta device.
    """
    handle = _emptied(model, device)
    for name, value in values:
        _fill(handle, name, value)


def _skeleton(handle: ShardedModel) -> nn.Module:
    if handle.skeleton is None:
        raise StrategyError(
            "the model had values when it was parallelized; build it under torch.device('meta') instead"
        )
    return handle.skeleton


def _emptied(model: nn.Module, device: torch.device | str) -> ShardedModel:
    """Give every meta parameter and buffer memory, still without values."""
    handle = sharded(model)
    _skeleton(handle)

    away = {id(one.parameter) for one in handle.parameters()} - {id(one.parameter) for one in handle.owned()}

    def make(old: nn.Parameter) -> nn.Parameter:
        if id(old) in away:
            return old
        return nn.Parameter(hollow(torch.empty_like(old, device=device)), old.requires_grad)

    fsdp.replace_parameters(model, make)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _empty(buffer, device)
    if handle.routing is not None:
        handle.routing.write_places(model)
    return handle


def _empty(like: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return per_rank(lambda rank: torch.empty(like.shape, dtype=like.dtype, device=device))


def _fill(handle: ShardedModel, name: str, source: Source) -> None:
    """Write this rank's pieces of one tensor, read as slices of `source`: a tensor, or a safetensors slice."""
    found = _parameters(handle).get(name)
    if found is not None and handle.pipeline is not None and not handle.pipeline.owns(name):
        return
    if found is None:
        buffer = handle.model.get_buffer(name)
        with one_device():
            for local in each_rank(buffer).values():
                local.copy_(source[(slice(None),) * local.dim()])
        return
    with filled(f"parameter.{name}", found.local), one_device():
        for rank, local in each_rank(found.local).items():
            fill_piece(local, source, found.layout, handle.axes.devices.coordinate(rank))


def _parameters(handle: ShardedModel) -> dict[str, ShardedParameter]:
    return {parameter.name: parameter for parameter in handle.parameters()}


def _elsewhere(handle: ShardedModel) -> frozenset[str]:
    """Parameters that other stages of a pipeline hold."""
    return frozenset(_parameters(handle)) - {one.name for one in handle.owned()}


# New values.


def initial_values(
    skeleton: nn.Module, seed: int, wanted: Collection[str] | None = None, elsewhere: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every parameter and buffer, or of those that are `wanted`, one module's at a time, as the
    model's own code computes them; not of modules whose parameters are all `elsewhere`."""
    known = names_of_parameters(skeleton)
    drawn: set[str] = set()
    with one_device():
        for path, module in skeleton.named_modules():
            if is_magnitude(path):
                continue
            names = {
                own: known[id(p)]
                for own, p in module._parameters.items()
                if p is not None and known[id(p)] not in drawn and _is_in(known[id(p)], wanted)
            }
            buffers = {
                own: f"{path}.{own}" if path else own for own, b in module._buffers.items() if b is not None
            }
            buffers = {own: name for own, name in buffers.items() if _is_in(name, wanted)}
            here = not names or any(name not in elsewhere for name in names.values())
            if here and (names or buffers):
                yield from _drawn(skeleton, path, module, names, buffers, seed)
                drawn.update(names.values())


def _is_in(name: str, wanted: Collection[str] | None) -> bool:
    return wanted is None or name in wanted


def _drawn(
    skeleton: nn.Module,
    path: str,
    module: nn.Module,
    names: dict[str, str],
    buffers: dict[str, str],
    seed: int,
) -> list[tuple[str, torch.Tensor]]:
    """Initialise one module's own tensors by the model's own code, and take them out again."""
    parameters, held = dict(module._parameters), dict(module._buffers)
    try:
        for own in names:
            empty = parameters[own]
            assert empty is not None
            # NaN shows what the model's code does not initialise.
            module._parameters[own] = nn.Parameter(torch.full_like(empty, torch.nan, device="cpu"))
        for own in buffers:
            buffer = held[own]
            assert buffer is not None
            fill = torch.nan if buffer.is_floating_point() else 0
            module._buffers[own] = torch.full_like(buffer, fill, device="cpu") if buffer.is_meta else buffer
        # With adapters or without, a module of the base model gets the same values.
        plain = name_in_base(path, skeleton)
        digest = hashlib.blake2b(
            f"{seed}/{path if plain is None else plain}".encode(), digest_size=8
        ).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            _run_initialisers(skeleton, path, module)
        values = [(name, _own(module, own)) for own, name in (names | buffers).items()]
    finally:
        module._parameters.update(parameters)
        module._buffers.update(held)
    for name, value in values:
        if value.is_floating_point() and value.numel() and bool(value.isnan().any()):
            raise StrategyError(
                f"{name!r} is not initialised by the model's own code when it is built on the meta device; "
                "build the model with values, or load them"
            )
    return values


def _own(module: nn.Module, own: str) -> torch.Tensor:
    tensor: torch.Tensor | None = module._parameters.get(own)
    if tensor is None:
        tensor = module._buffers[own]
    assert tensor is not None
    return tensor.detach()


def _run_initialisers(skeleton: nn.Module, path: str, module: nn.Module) -> None:
    """The module's own initialisation, then that of the modules around it, which may refine it (GPT-2 scales its
    output projections from the block). Tensors of other modules are on the meta device, where writing is free."""
    if not is_transformers(skeleton):
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()
        return
    if name_in_base(path, skeleton) is None:
        layer, _, adapter = path.rpartition(".")
        peft: Any = skeleton
        how = peft.peft_config[adapter].init_lora_weights
        if not isinstance(module, nn.Linear):
            raise StrategyError(
                f"{path!r} is a {type(module).__name__}; new adapters are drawn for linear layers only: load them, or "
                "name other target_modules"
            )
        initialise(skeleton.get_submodule(layer.rpartition(".")[0]), adapter, module, how)
        return
    around = [path]
    while around[-1]:
        around.append(around[-1].rpartition(".")[0])
    for name in around:
        outer: Any = skeleton.get_submodule(name)
        owner: Any = next((p for p in _owners(skeleton, name) if hasattr(p, "_init_weights")), skeleton)
        owner._init_weights(outer)


def _owners(skeleton: nn.Module, name: str) -> Iterator[Any]:
    """The modules on the way from `name` up to the model, the innermost first."""
    while True:
        yield skeleton.get_submodule(name)
        if not name:
            return
        name = name.rpartition(".")[0]
