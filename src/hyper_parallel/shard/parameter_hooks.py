"""Hooks and attributes of parameters, carried over to the parameters that take their place.

A hook means the gradient of the whole parameter, over all rows: a mask, a clip, an update in the backward pass. A rank
has a part of it, and of its rows only. So hooks are called at the end of a backward pass with the gradient that was
reduced and gathered, on every rank alike, and each keeps its part of the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.fsdp import Hooks, at_end_of_backward, hooks_of
from hyper_parallel.compat.fsdp_groups import after_backward
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.sharded_model import ShardedModel, ShardedParameter, local_of


class ParameterHooks:
    """Hooks that the user put on the parameters of a model before it was parallelized."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks: dict[str, Hooks] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        for name, parameter in model.named_parameters():
            if hooks := hooks_of(parameter):
                self._hooks[name] = hooks
            if attributes := fsdp.attributes_of(parameter):
                self._attributes[name] = attributes
        self._handle: ShardedModel | None = None
        self._before: dict[str, Tensor | None] | None = None
        """Whole gradients at the step's first forward pass, of parameters with hooks."""
        self._queued = False
        self._watched: dict[int, nn.Parameter] = {}

    def refuse(self, why: str) -> None:
        """Raise StrategyError where a parameter has a hook."""
        for name in self._hooks:
            raise StrategyError(
                f"the parameter {name!r} has a hook, and {why}; remove it, or change gradients after the backward pass"
            )

    def apply(self, handle: ShardedModel) -> None:
        """Put everything on the parameters that the model has now."""
        model = handle.model
        for name, parameter in model.named_parameters():
            vars(parameter).update(self._attributes.get(name, {}))
        if handle.mesh.world == 1:
            self._register(model)
            return
        self._handle, sharded = handle, fsdp.fully_sharded(model)
        if sharded:
            after_backward(model, self._call)
        if not self._hooks:
            return
        wrap(model, self._around)

    def _register(self, model: nn.Module) -> None:
        """On one device a parameter may have been exchanged for one of another dtype."""
        for name, hooks in self._hooks.items():
            parameter = model.get_parameter(name)
            if not hooks_of(parameter):
                for hook in hooks.of_gradient.values():
                    parameter.register_hook(hook)
                for after in hooks.after_accumulation.values():
                    parameter.register_post_accumulate_grad_hook(after)

    def _around(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if self._before is None and torch.is_grad_enabled():
            assert self._handle is not None
            model = self._handle.model
            now = dict(model.named_parameters()) | fsdp.shards(model)
            if not fsdp.fully_sharded(model):
                self._watch([now[name] for name in self._hooks])
            gradients = {name: now[name].grad for name in self._hooks}
            self._before = {
                name: None if gradient is None else local_of(gradient).clone()
                for name, gradient in gradients.items()
            }
        return forward(*args, **kwargs)

    def _parameters(self) -> list[ShardedParameter]:
        assert self._handle is not None
        return self._handle.parameters()

    def _watch(self, parameters: list[nn.Parameter]) -> None:
        """Have the end of a backward pass through these parameters call the hooks; loaded weights are other ones."""
        for parameter in parameters:
            if id(parameter) not in self._watched:
                parameter.register_post_accumulate_grad_hook(self._queue)
                self._watched[id(parameter)] = parameter

    def _queue(self, _: Tensor) -> None:
        if not self._queued:
            self._queued = True
            at_end_of_backward(self._call)

    def _call(self) -> None:
        """Call the hooks of the parameters whose gradients are whole now."""
        assert self._handle is not None
        self._queued = False
        if not fsdp.gradients_are_whole(self._handle.model):
            return
        before, self._before = self._before or {}, None
        later = fsdp.hooked_shards(self._handle.model)
        if not self._hooks and not later:
            return
        for one in self._parameters():
            hooks = self._hooks.get(one.name, Hooks({}, {}))
            of_gradient = [*hooks.of_gradient.values(), *later.get(id(one.parameter), [])]
            if one.grad is not None and (of_gradient or hooks.after_accumulation):
                self._call_of(one, before.get(one.name), of_gradient, [*hooks.after_accumulation.values()])

    def _call_of(self, one: ShardedParameter, before: Tensor | None, of_gradient: Any, after: Any) -> None:
        handle, local = self._handle, one.grad
        assert handle is not None
        assert local is not None
        with torch.no_grad():
            whole = handle.gather(local if before is None else local - before, one.layout).clone()
            for hook in of_gradient:
                changed = hook(whole)
                whole = whole if changed is None else changed
            if before is not None:
                whole = whole + handle.gather(before, one.layout)
            if after:
                stand_in = nn.Parameter(handle.gather(one.local, one.layout).clone(), requires_grad=True)
                vars(stand_in).update(self._attributes.get(one.name, {}))
                stand_in.grad = whole
                for call in after:
                    call(stand_in)
                one.local.copy_(handle.cut(stand_in.detach(), one.layout))
                if stand_in.grad is None:
                    one.parameter.grad = None
                    return
                whole = stand_in.grad
            local.copy_(handle.cut(whole, one.layout))
