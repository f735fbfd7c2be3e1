"""Hooks that a user registered on a parameter, as PyTorch keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Variable


class Hooks(NamedTuple):
    """The hooks of one parameter. The dicts are PyTorch's own: a hook that is removed later is gone from them."""

    of_gradient: dict[int, Callable[[Tensor], Tensor | None]]
    """`register_hook`: called with the gradient of a backward pass."""
    after_accumulation: dict[int, Callable[[Tensor], None]]
    """`register_post_accumulate_grad_hook`: called with the parameter, once its `.grad` is summed."""

    def __bool__(self) -> bool:
        return bool(self.of_gradient or self.after_accumulation)


def hooks_of(parameter: Tensor) -> Hooks:
    """The hooks that are registered on a parameter now."""
    return Hooks(
        parameter._backward_hooks or {}, getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    )


def move_hooks(old: Tensor, new: Tensor) -> None:
    """Give a parameter the hooks of the one whose place it takes."""
    if hooks := hooks_of(old):
        new._backward_hooks = hooks.of_gradient or None
        if hooks.after_accumulation:
            new._post_accumulate_grad_hooks = hooks.after_accumulation


def at_end_of_backward(call: Callable[[], Any]) -> None:
    """Inside of a backward pass: call a function when all gradients are there, after what else was queued."""
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(call))
