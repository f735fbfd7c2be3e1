"""Parameter paging: brings each module's offloaded parameters back while its forward pass runs.

For what happens between the steps of a graph: an evaluation, a sample of text. Buffers are few bytes, and a module may
read those of another (a router's bias, where the layer adds it), so that all are there while the model's forward runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from hyper_parallel.compat.paged_out_parameters import present


def lend(model: nn.Module) -> None:
    """From now on the forward pass of each module of the model borrows the parameters that are its own, and that of
    the model itself every buffer."""
    for module in model.modules():
        if module._parameters or module is model:
            open_: list[contextlib.ExitStack] = []
            module.register_forward_pre_hook(_Begin(open_, buffers=module is model))
            module.register_forward_hook(_End(open_), always_call=True)


class _Begin:
    def __init__(self, open_: list[contextlib.ExitStack], buffers: bool) -> None:
        self._open, self._buffers = open_, buffers

    def __call__(self, module: nn.Module, args: Any) -> None:
        stack = contextlib.ExitStack()
        buffers = module.buffers() if self._buffers else ()
        stack.enter_context(present(*module._parameters.values(), *buffers))
        self._open.append(stack)


class _End:
    def __init__(self, open_: list[contextlib.ExitStack]) -> None:
        self._open = open_

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().close()
