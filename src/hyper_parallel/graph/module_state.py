"""State of a module as inputs of a captured step."""

from __future__ import annotations

from torch import nn

from hyper_parallel.graph.ir import GivenTensor


def module_state(model: nn.Module) -> dict[str, GivenTensor]:
    """Parameters as ``parameter.<name>`` and buffers as ``buffer.<name>``; tied ones under their first name."""
    parameters = {f"parameter.{name}": GivenTensor("parameter", x) for name, x in model.named_parameters()}
    return parameters | {f"buffer.{name}": GivenTensor("buffer", x) for name, x in model.named_buffers()}
