"""Calling a model the way training does: no cache, positions given, logits back."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat import fsdp


def logits_of(model: nn.Module, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits [B, S, V] for ids and positions, both int64 [B, S].

    A Transformers model is given `position_ids`, in which a packed document restarts at 0, no attention mask
    and `use_cache=False`: only then does it keep packed documents apart. Any other module is given what its
    `forward` has parameters for, and returns the logits or an object that has them as `logits`.
    """
    output = model(input_ids, **_extra(model, position_ids))
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[no-any-return]


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Forward passes without gradients, nothing dropped; afterwards the model is as it was, memory included."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        fsdp.free_gathered(model)


def _extra(model: nn.Module, position_ids: Tensor) -> dict[str, Any]:
    given = {"position_ids": position_ids, "use_cache": False}
    taken = _taken(type(model).forward)
    return {name: value for name, value in given.items() if name in taken}


@functools.cache
def _taken(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
