"""A model whose parameters may be away, run by its own code: each module's are there while its forward runs.

For what happens between the steps of a graph: an evaluation, a sample of text.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from hyper_parallel.compat.absent import present


def lend(model: nn.Module) -> None:
    """From now on the forward pass of each module of the model borrows the parameters that are its own."""
    for module in model.modules():
        if module._parameters:
            open_: list[contextlib.ExitStack] = []
            module.register_forward_pre_hook(_Begin(open_))
            module.register_forward_hook(_End(open_), always_call=True)


class _Begin:
    def __init__(self, open_: list[contextlib.ExitStack]) -> None:
        self._open = open_

    def __call__(self, module: nn.Module, args: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(present(*module._parameters.values()))
        self._open.append(stack)


class _End:
    def __init__(self, open_: list[contextlib.ExitStack]) -> None:
        self._open = open_

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().close()
