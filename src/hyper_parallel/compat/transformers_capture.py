"""Tensors without values, run through Transformers' code as if they had some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import import_utils


@contextlib.contextmanager
def taken_for_real() -> Iterator[None]:
    """Inside, Transformers takes fake tensors for real ones, so that it chooses the kernels that it chooses eagerly.

    Else it builds a mask wherever one might be needed, which other attention kernels serve, with other last bits.
    """
    known = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = _no  # type: ignore[assignment]
    try:
        yield
    finally:
        import_utils.is_fake_tensor = known


@contextlib.contextmanager
def computed_once(model: nn.Module) -> Iterator[list[str]]:
    """Inside, Transformers' layers that would be computed again in the backward pass are not; their names."""
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


def _no(x: Any) -> bool:
    return False
