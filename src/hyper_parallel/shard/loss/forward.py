"""Calls a model as training does: no cache, explicit positions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.packed_documents import positions_known


def call(model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, **inputs: Any) -> Any:
    """What the model returns for ids and positions, both int64 [B, S], and what else it takes (`pixel_values`).

    A Transformers model is given `position_ids`, in which a packed document restarts at 0, no attention mask and
    `use_cache=False`: only then does it keep packed documents apart. Its masks find the positions also where it does
    not hand them on; where the model's own numbers begin above 0 (RoBERTa), so do those it is given. Some hand
    `use_cache` on without naming it as a parameter (Granite's mixtures, LLaVA). Any other module is given what its
    `forward` has parameters for.
    """
    given: dict[str, Any] = {"use_cache": False}
    core: Any = without_adapters(model)
    if position_ids is not None:
        first = first_position(core)
        given["position_ids"] = position_ids + first if first else position_ids
    taken = parameters_of(type(core).forward)
    if _hands_on(type(core).forward) and _may_cache(core):
        taken = taken | {"use_cache"}
    with positions_known(position_ids):
        return model(input_ids, **{name: value for name, value in given.items() if name in taken}, **inputs)


def first_position(model: nn.Module) -> int:
    """The number of a row's first position where the model numbers positions itself: not 0 where their table begins
    with a row for padding (RoBERTa)."""
    if model not in _first_positions:
        _first_positions[model] = next(
            (_numbered(one) for one in model.modules() if hasattr(one, _NUMBERS)), 0
        )
    return _first_positions[model]


def _numbered(module: Any) -> int:
    if not isinstance(module.padding_idx, int):
        return 0
    with outside_modes(), torch.device("cpu"):
        token = torch.tensor([[module.padding_idx + 1]])
        return int(getattr(module, _NUMBERS)(token, module.padding_idx)[0, 0])


_NUMBERS = "create_position_ids_from_input_ids"
"""The function by which every family with such a table numbers positions."""
_first_positions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _may_cache(model: Any) -> bool:
    """Whether a Transformers model's config says whether it caches keys and values."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return hasattr(text, "use_cache")


@functools.cache
def _hands_on(forward: Callable[..., Any]) -> bool:
    """Whether a `forward` takes any keyword."""
    kinds = (one.kind for one in inspect.signature(forward).parameters.values())
    return inspect.Parameter.VAR_KEYWORD in kinds


def logits_in(output: Any) -> Tensor:
    """The logits in what a model returned: the tensor itself, or the object's `logits`."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def logits_of(model: nn.Module, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Logits [B, S, V] of `call`, whole."""
    return logits_in(call(model, input_ids, position_ids))


@functools.cache
def parameters_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters of a module's `forward`."""
    return frozenset(inspect.signature(forward).parameters)
