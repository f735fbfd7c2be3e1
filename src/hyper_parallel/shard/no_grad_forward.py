"""Forward passes without a backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from hyper_parallel.compat import fsdp


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Forward passes without gradients, nothing dropped; afterwards the model is as it was, memory included."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), fsdp.gathered_between_passes(model):
            yield
    finally:
        for module in training:
            module.training = True
