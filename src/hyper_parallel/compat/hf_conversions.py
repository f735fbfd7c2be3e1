"""Names and shapes of weights in a Hugging Face folder, as Transformers itself reads and writes them.

Transformers' own code is run on tensors without values (`traced_tensors`): what `from_pretrained` makes of a folder's
tensors, and what `save_pretrained` makes of a model's. Neither its mapping of names nor its operations are repeated
here. These are interfaces of Transformers between its own modules, so that all uses of them are in this file: also what
its layers do while a step is captured.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.traced_tensors import TracedTensor
from hyper_parallel.errors import CheckpointError


@dataclass(frozen=True)
class Loading:
    """The tensors that `from_pretrained` makes of a folder, by names of the model's state dict: each name of a tied
    weight too."""

    tensors: dict[str, TracedTensor]
    missing: frozenset[str]
    """The folder lacks them, and the model's class does not say that it may."""
    unexpected: tuple[str, ...]
    """The model does not take them, and its class does not say that they may be there."""
    shapes: dict[str, tuple[int, ...]]
    """Name to the shape that the folder has, of weights that have another one in the model."""
    errors: dict[str, str]
    """Name to why it cannot be computed from what the folder has."""


def loading(model: nn.Module, stored: Mapping[str, TracedTensor]) -> Loading:
    """The weights that stored tensors become, by their names in the folder, in a Transformers model on the meta device.

    Raises CheckpointError where the installed Transformers has no such interface.
    """
    owner = _owner()
    blank: Any = copy.deepcopy(model)
    settings = owner.LoadStateDictConfig(
        device_map={"": "meta"}, weight_mapping=owner.get_model_conversion_mapping(blank)
    )
    load = owner.convert_and_load_state_dict_in_model
    older = {"tp_plan": None} if "tp_plan" in inspect.signature(load).parameters else {}
    with _quiet():
        report, _ = load(model=blank, state_dict=dict(stored), load_config=settings, **older)
    blank._adjust_missing_and_unexpected_keys(report)
    tensors = {}
    for name in blank.state_dict():
        tensor = blank.get_parameter_or_buffer(name)
        if isinstance(tensor, TracedTensor):
            tensors[name] = tensor
    return Loading(
        tensors,
        frozenset(report.missing_keys),
        tuple(sorted(report.unexpected_keys)),
        {name: tuple(stored_shape) for name, stored_shape, _ in report.mismatched_keys},
        dict(report.conversion_errors),
    )


def saving(model: nn.Module, tensors: Mapping[str, TracedTensor]) -> dict[str, TracedTensor]:
    """The tensors that `save_pretrained` writes of a Transformers model on the meta device, by names in the folder.

    `tensors`: those of its state dict. Raises CheckpointError where the installed Transformers has no such interface,
    or cannot write what it can read.
    """
    owner = _owner()
    blank: Any = model
    state = blank.state_dict()
    for name in blank._keys_to_ignore_on_save or ():
        state.pop(name, None)
    # Older versions look for each tensor without values among the parameters.
    parameters = dict(blank.named_parameters(remove_duplicate=False))
    once = owner.remove_tied_weights_from_state_dict(
        {name: tensor for name, tensor in state.items() if name in parameters}, blank
    )
    names = [name for name in state if name in once or name not in parameters]
    try:
        written = owner.revert_weight_conversion(blank, {name: tensors[name] for name in names})
    except Exception as error:  # its operations raise what torch raises
        raise CheckpointError(
            f"Transformers cannot write the weights of {type(model).__name__} under the names that it reads: "
            f"{' '.join(str(error).split())[:200]}; save them with its own save_pretrained"
        ) from error
    return dict(written)


def blank_model(config: Mapping[str, Any], names: Collection[str]) -> nn.Module | None:
    """The Transformers model, on the meta device, of a config as JSON has it, whose weights have these names; None
    where Transformers has none. Of a tied weight one name suffices."""
    if (hf := _config(config)) is None:
        return None
    for kind in _classes(hf):
        try:
            with torch.device("meta"):
                model: nn.Module = kind._from_config(copy.deepcopy(hf))
        except Exception:  # a class of another task may need fields that this config lacks
            continue
        if _holds(model, names):
            return model
    return None


def has_float32_exceptions(model: Any) -> bool:
    """Whether `from_pretrained` leaves some weights in float32 where the model's dtype is a shorter one."""
    half = model.dtype in (torch.float16, torch.bfloat16)
    kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return half and any(getattr(model, key, None) for key in kept)


def _config(fields: Mapping[str, Any]) -> Any:
    """Transformers' config object; None for a family that it does not know, or fields that it does not take."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if fields.get("model_type") not in CONFIG_MAPPING:
        return None
    # From a file, since only there it decodes what JSON has no notation for, such as an infinite limit.
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception:  # its validation raises classes of huggingface_hub's own
            return None


def _classes(hf: Any) -> Iterator[Any]:
    """Classes of models of a config: the one that it names, that of language models, and those of other tasks."""
    import transformers
    from transformers.models.auto import modeling_auto

    named = [getattr(transformers, str(name), None) for name in hf.architectures or ()]
    mappings = [
        name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING")
    ]
    mappings.sort(key=lambda name: name != "MODEL_FOR_CAUSAL_LM_MAPPING")
    for name in mappings:
        mapping = getattr(modeling_auto, name)
        if type(hf) in mapping:
            kinds = mapping[type(hf)]
            named += kinds if isinstance(kinds, (tuple, list)) else [kinds]
    for kind in dict.fromkeys(named):
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            yield kind


def _holds(model: nn.Module, names: Collection[str]) -> bool:
    """Whether the names are those of a model's weights and persistent buffers, each under one of its names at least."""
    held = shared_names(model)
    return set(names) <= held.keys() and all(not group.isdisjoint(names) for group in held.values())


def shared_names(model: nn.Module) -> dict[str, frozenset[str]]:
    """Each name of the state dict to all names of that tensor, which are several where weights are tied."""
    groups: dict[int, set[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {name: frozenset(groups[id(tensor)]) for name, tensor in state.items()}


def _owner() -> Any:
    """Transformers' functions, of whichever module the installed version has them in."""
    try:
        from transformers import conversion_mapping, core_model_loading, modeling_utils

        return SimpleNamespace(
            convert_and_load_state_dict_in_model=core_model_loading.convert_and_load_state_dict_in_model,
            revert_weight_conversion=core_model_loading.revert_weight_conversion,
            get_model_conversion_mapping=conversion_mapping.get_model_conversion_mapping,
            LoadStateDictConfig=modeling_utils.LoadStateDictConfig,
            remove_tied_weights_from_state_dict=modeling_utils.remove_tied_weights_from_state_dict,
        )
    except (ImportError, AttributeError) as error:
        import transformers

        raise CheckpointError(
            f"Transformers {transformers.__version__} reads and writes folders in a way that is not known here "
            f"({error}); install a version that pyproject.toml names, such as the one of requirements/lock.txt"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' progress bar, since no weights are read."""
    from transformers.utils import logging

    # Not `disable_progress_bar`, which turns off those of the Hub too, for good where the environment says so.
    bars: Any = logging
    active, bars._tqdm_active = bars._tqdm_active, False
    try:
        yield
    finally:
        bars._tqdm_active = active


@contextlib.contextmanager
def taken_for_real() -> Iterator[None]:
    """Inside, Transformers takes fake tensors for real ones, so that it chooses the kernels that it chooses eagerly.

    Else it builds a mask wherever one might be needed, which other attention kernels serve, with other last bits.
    """
    from transformers.utils import import_utils

    known = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda x: False  # type: ignore[assignment]
    try:
        yield
    finally:
        import_utils.is_fake_tensor = known


@contextlib.contextmanager
def computed_once(model: nn.Module) -> Iterator[list[str]]:
    """Inside, Transformers' layers that would be computed again in the backward pass are not; their names."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing and layer.training
    }
    known = {name: layer.__dict__.get("gradient_checkpointing") for name, layer in layers.items()}
    for layer in layers.values():
        layer.gradient_checkpointing = False
    try:
        yield list(layers)
    finally:
        for name, layer in layers.items():
            if known[name] is None:
                del layer.gradient_checkpointing
            else:
                layer.gradient_checkpointing = known[name]
