"""PyTorch's errors on weights that are used or written where they are shards, as one line that names the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.hooks import Forward, wrap

_USED = "got mixed torch.Tensor and DTensor"
_WRITTEN = ("Output 0 of _Moved is a view", "Output 0 of _Local is a view")
WRITTEN_UNDER_TENSOR = (
    "which is kept under axes.shard and axes.replicate alone; write it outside of the forward pass, or set axes.tensor "
    "to 1"
)


def explain_errors(model: nn.Module) -> None:
    """Raise StrategyError where the model's code meets a shard in a weight's place."""
    name = type(model).__name__.removeprefix("FSDP")

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            if _USED in text:
                raise StrategyError(
                    f"the forward pass of {name} uses a weight outside of the layer that it belongs to, or in a hook "
                    "before that layer's forward pass, where axes.tensor with axes.shard or axes.replicate has a "
                    "shard of it; use it inside, or set axes.tensor to 1"
                ) from error
            if any(one in text for one in _WRITTEN):
                raise StrategyError(
                    f"the forward pass of {name} writes a weight, {WRITTEN_UNDER_TENSOR}"
                ) from error
            raise

    wrap(model, wrapper)
