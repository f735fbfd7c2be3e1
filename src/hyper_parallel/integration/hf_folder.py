"""Hugging Face folders: written from a parallelized model, and read into one.

A parameter at a time is gathered, and only rank 0 keeps it, in host memory: what it holds at the end is one whole model
in the dtype that is written. Transformers' own `save_pretrained` then writes it, so that names, ties, generation config
and custom code are as it has them; of a model with adapters PEFT's writes the adapters alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.checkpoint.adapters import MODEL
from hyper_parallel.checkpoint.shard import dtype_name
from hyper_parallel.compat import fsdp
from hyper_parallel.compat.hf_conversions import blank_model
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import CheckpointError
from hyper_parallel.integration.checkpoints import adapter_names, ranks_of, together
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.folder_weights import FolderWeights
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.model_structure import is_transformers
from hyper_parallel.shard.process_mesh import PipelinePlace
from hyper_parallel.shard.reshard import fill_piece
from hyper_parallel.shard.safetensors_folder import Folder
from hyper_parallel.train.checkpoint_state import model_names, model_shards

ADAPTERS = "adapter_model.safetensors"
"""The file that PEFT keeps adapters in."""


def write_folder(
    handle: ShardedModel,
    out: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Write the model to `out`, as `from_pretrained` loads it. A collective; rank 0 writes.

    `tokenizer`: what else has a `save_pretrained` and belongs there, a tokenizer or processor. Floating-point tensors
    are written as they are stored, or as `dtype`. `max_shard_size`: bytes or ``"5GB"``, above which there are several
    files with an index; left out, what Transformers takes.

    Raises CheckpointError, on all ranks, if the folder cannot be written.
    """
    target = Path(out)
    fsdp.free_gathered(handle.model)
    held = _gathered(handle, dtype)
    ranks = ranks_of(handle)
    with together(ranks, target):
        if ranks.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            _save(handle.model, target, held, max_shard_size)
            if tokenizer is not None:
                tokenizer.save_pretrained(target)


@torch.no_grad()
def read_folder(handle: ShardedModel, folder: str | os.PathLike[str]) -> None:
    """Fill a spread model from what `write_folder` or `save_pretrained` wrote. A collective; each reads its pieces.

    Of a model with adapters the adapters are read, and the rest stays.

    Raises CheckpointError, on all ranks, when a tensor is missing, has another shape, or a file cannot be read.
    """
    source = Path(folder)
    fsdp.free_gathered(handle.model)
    ranks = ranks_of(handle)
    with together(ranks, source, "read"):
        if without_adapters(handle.model) is handle.model:
            _read(handle, source)
        else:
            _read_adapters(handle, source)


def _gathered(handle: ShardedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Name in the model to whole tensor in host memory, on rank 0; empty elsewhere."""
    wanted = adapter_names(handle)
    if wanted is not None:
        # PEFT writes the embeddings, too, where they were resized.
        model: Any = handle.model
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        embeddings = {id(p) for module in ends if module is not None for p in module.parameters()}
        wanted |= {p.name for p in handle.parameters() if id(p.parameter) in embeddings}
    held: dict[str, Tensor] = {}
    pieces = model_shards(handle)
    for key in model_names(handle):
        name = key.removeprefix(MODEL)
        if wanted is not None and name not in wanted:
            continue
        with torch.no_grad(), contextlib.ExitStack() as stack:
            whole: Tensor | None = None
            if key in pieces:
                stack.enter_context(present(pieces[key].local))
                whole = handle.gather(pieces[key].local, pieces[key].layout)
            if handle.pipeline is not None:
                whole = _from_stage(handle, handle.pipeline, name, whole)
            if handle.rank == 0:
                assert whole is not None, "rank 0 holds it, or was sent it"
                kind = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
                # A copy, since memory that a budget lends is taken back.
                held[name] = whole.to("cpu", kind, copy=True)
    return held


def _from_stage(handle: ShardedModel, place: PipelinePlace, name: str, whole: Tensor | None) -> Tensor | None:
    """A whole tensor of the stages' device groups on rank 0, which may be in none that holds it."""
    holders = place.holders(name)
    if any(0 in group.ranks for group in holders):
        return whole
    sender = holders[0].ranks[0]
    if handle.rank == sender:
        assert whole is not None, "this rank holds it"
        dist.send(whole.contiguous(), 0)
    elif handle.rank == 0:
        known = {one.name: one for one in handle.parameters()}
        if name in known:
            shape, kind = known[name].layout.shape, known[name].parameter.dtype
        else:
            buffer = handle.model.get_buffer(name)
            shape, kind = tuple(buffer.shape), buffer.dtype
        whole = torch.empty(shape, dtype=kind, device=handle.device)
        dist.recv(whole, sender)
    return whole


def _save(model: Any, out: Path, held: dict[str, Tensor], max_shard_size: int | str | None) -> None:
    limit = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if hasattr(model, "save_pretrained"):
        floating = {tensor.dtype for tensor in held.values() if tensor.is_floating_point()}
        model.save_pretrained(out, state_dict=held, **limit)  # which empties what it is given
        _name_dtype(out / "config.json", floating)
        return
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in held.items()}, out / "model.safetensors")


def _name_dtype(config: Path, floating: set[torch.dtype]) -> None:
    """Transformers loads in the type that the config names, and notes that of the model, not of what was written."""
    if len(floating) != 1 or not config.is_file():  # adapters have no config.json
        return
    content = json.loads(config.read_text(encoding="utf-8"))
    if content.get("dtype") != (dtype := dtype_name(floating.pop())):
        config.write_text(
            json.dumps({**content, "dtype": dtype}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def _read(handle: ShardedModel, folder: Path) -> None:
    with Folder(folder) as files:
        weights = FolderWeights(files, _blank(handle))
        weights.refuse_untied()
        if handle.rank == 0:
            weights.log_unexpected()
        for key, piece in model_shards(handle).items():
            # What the folder may lack stays as it is.
            if (source := weights.sources.get(key.removeprefix(MODEL))) is not None:
                with present(piece.local, changed=True):
                    fill_piece(piece.local, source, piece.layout, handle.coordinate)


def _blank(handle: ShardedModel) -> nn.Module:
    """The model before it was spread, on the meta device."""
    if handle.skeleton is not None:
        return handle.skeleton
    # Those of all stages of a pipeline, which is why the pieces of this rank do not do.
    known = {parameter.name: parameter.layout.shape for parameter in handle.parameters()}
    names = [key.removeprefix(MODEL) for key in model_names(handle)]
    shapes = {
        name: known[name] if name in known else tuple(handle.model.get_buffer(name).shape) for name in names
    }
    config: Any = getattr(handle.model, "config", None)
    if is_transformers(handle.model):
        fields = json.loads(config.to_json_string(use_diff=False))
        if (found := blank_model(fields, shapes)) is not None:
            return found
    # Another module has its own names in the folder.
    blank = nn.Module()
    for name, shape in shapes.items():
        module, (*path, last) = blank, name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_buffer(last, torch.empty(shape, device="meta"))
    return blank


def _read_adapters(handle: ShardedModel, folder: Path) -> None:
    from safetensors.torch import load_file

    model: Any = handle.model
    known = {p.name: p for p in handle.parameters()}
    for adapter in model.peft_config:
        path = folder / ADAPTERS if adapter == "default" else folder / adapter / ADAPTERS
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the folder holds no adapter {adapter!r}")
        for name, whole in load_file(path).items():
            parameter = known.get(_name_in_model(name, adapter, known))
            if parameter is None:
                raise CheckpointError(f"{path}: there is no place for {name!r}; it is of other adapters")
            if tuple(whole.shape) != parameter.layout.shape:
                raise CheckpointError(
                    f"{path}: {name!r} has shape {list(whole.shape)}, the model needs {list(parameter.layout.shape)}"
                )
            if handle.pipeline is None or handle.pipeline.owns(parameter.name):
                with present(parameter.local, changed=True):
                    fill_piece(parameter.local, whole, parameter.layout, handle.coordinate)


def _name_in_model(name: str, adapter: str, known: Any) -> str:
    """The parameter that PEFT wrote as `name`, which leaves the adapter's name out."""
    owner, _, own = name.rpartition(".")
    candidates = (f"{owner}.{adapter}.{own}", f"{owner}.modules_to_save.{adapter}.{own}", name)
    return next((candidate for candidate in candidates if candidate in known), name)
