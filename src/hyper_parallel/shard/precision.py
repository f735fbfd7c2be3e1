"""The compute dtype of each module, and the casts at the edges where it changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.pytree import mapped
from hyper_parallel.shard.hooks import Forward, Wrapper, wrap
from hyper_parallel.shard.rules import matching_or_refuse
from hyper_parallel.strategy import Precision


def dtype(name: str) -> torch.dtype:
    """The torch dtype that a file's name for it means."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def compute_dtypes(model: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """Module name to compute dtype. A pattern's dtype holds for the module and everything below it."""
    names = [name for name, _ in model.named_modules()]
    matched: dict[str, torch.dtype] = {"": dtype(precision.compute)}
    for pattern, theirs in precision.modules.items():
        found = matching_or_refuse(pattern, names, "strategy.precision.modules")
        matched.update(dict.fromkeys(found, dtype(theirs)))
    dtypes: dict[str, torch.dtype] = {}
    for name in names:  # parents come before children
        dtypes[name] = matched[name] if name in matched else dtypes[name.rpartition(".")[0]]
    return dtypes


def apply_casts(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Where a module computes in another dtype than its parent, cast what goes in and what comes out."""
    for name, module in model.named_modules():
        inner, outer = dtypes[name], dtypes[name.rpartition(".")[0]]
        if not name and inner != torch.float32:
            wrap(module, _cast(inner, None))
        elif inner != outer:
            wrap(module, _cast(inner, outer))


def _cast(inner: torch.dtype, outer: torch.dtype | None) -> Wrapper:
    def to(x: Any, wanted: torch.dtype) -> Any:
        return x.to(wanted) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped(lambda x: to(x, inner), (args, kwargs))
        output = forward(*args, **kwargs)
        return output if outer is None else mapped(lambda x: to(x, outer), output)

    return wrapper
