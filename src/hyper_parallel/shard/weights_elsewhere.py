"""PyTorch's errors on weights that are used or written where they are shards, as one line that names the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.compat.fsdp_groups import CHANGED_OUTPUT
from hyper_parallel.compat.pytree import leaves_of
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.model_structure import REGISTERED

_USED = "got mixed torch.Tensor and DTensor"
_WRITTEN = ("Output 0 of _Moved is a view", "Output 0 of _Local is a view")
WRITTEN_UNDER_TENSOR = (
    "which is kept under axes.shard and axes.replicate alone; write it outside of the forward pass, or set axes.tensor "
    "to 1"
)


def refuse_parameters_in_attributes(model: nn.Module) -> None:
    """Raise StrategyError for a parameter that a module keeps in an attribute: another one will take its place."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in REGISTERED or (isinstance(module, nn.RNNBase) and key == "_flat_weights"):
                continue
            kept = next((names[id(one)] for one in leaves_of(value) if id(one) in names), None)
            if kept is not None:
                raise StrategyError(
                    f"the module {name or type(model).__name__!r} keeps the parameter {kept!r} in its attribute "
                    f"{key!r}, which would stay what it is now while shards are trained; take it from its module in "
                    "the forward pass"
                )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise StrategyError for an embedding with sparse gradients, which no collective reduces."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise StrategyError(
                f"{name!r} is an {type(module).__name__} with sparse=True, and sparse gradients cannot be reduced over "
                "ranks; build it with sparse=False"
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
            if CHANGED_OUTPUT in text:
                raise StrategyError(
                    f"the forward pass of {name} changes the output of one of its layers in place, which is a view, so "
                    "that the layer's weights would not be gathered for the backward pass; write out = out + x in the "
                    "place of out += x"
                ) from error
            if any(one in text for one in _WRITTEN):
                raise StrategyError(
                    f"the forward pass of {name} writes a weight, {WRITTEN_UNDER_TENSOR}"
                ) from error
            raise

    wrap(model, wrapper)
