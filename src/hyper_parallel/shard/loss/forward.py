"""Calls a model as training does: no cache, explicit positions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.packed_documents import positions_known


def call(model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, **inputs: Any) -> Any:
    """What the model returns for ids and positions, both int64 [B, S], and what else it takes (`pixel_values`).

    A Transformers model is given `position_ids`, in which a packed document restarts at 0, no attention mask and
    `use_cache=False`: only then does it keep packed documents apart. Its masks find the positions also where it does
    not hand them on. Some hand `use_cache` on without naming it as a parameter (Granite's mixtures, LLaVA). Any other
    module is given what its `forward` has parameters for.
    """
    given: dict[str, Any] = {"use_cache": False}
    if position_ids is not None:
        given["position_ids"] = position_ids
    core: Any = without_adapters(model)
    taken = parameters_of(type(core).forward)
    if _hands_on(type(core).forward) and _may_cache(core):
        taken = taken | {"use_cache"}
    with positions_known(position_ids):
        return model(input_ids, **{name: value for name, value in given.items() if name in taken}, **inputs)


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
