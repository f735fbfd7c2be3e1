"""Optimizers on local shards: twin tensors that share the parameters' memory; clipping by the whole gradient's norm.

An optimizer whose update is elementwise,

    p[i], s[i] ← f(p[i], g[i], s[i]; lr, …)

needs no more than the elements that a rank holds. FSDP2's parameters are DTensors, those of several axes lie on several
device meshes, and others on none: together no fused or foreach kernel takes them. So each DTensor in the optimizer's
groups is exchanged for a twin, an `nn.Parameter` over the same local memory. The twins are given the local gradients
just before a step and lose them right after it. The optimizer's state is then local tensors, laid out as the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyper_parallel.errors import IntegrationError
from hyper_parallel.layout import Layout
from hyper_parallel.shard import ShardedModel

_ATTRIBUTE = "_hyper_parallel"
_OF_PARAMETERS = ("params", "param_names")
"""Keys of a group that list its parameters; all others are settings."""
_Kind = TypeVar("_Kind", bound=Optimizer)

_elementwise: set[type[Optimizer]] = {
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


def elementwise(cls: type[_Kind]) -> type[_Kind]:
    """Declare that an optimizer's update of an element needs that element's value, gradient and state only.

    PyTorch's own are known. A class of another origin is taken for parameters that are split once it is declared, by
    this call or decorator; a class derived from it is another one. What is declared is not checked.
    """
    _elementwise.add(cls)
    return cls


@dataclass(frozen=True, eq=False)
class Twin:
    """One parameter of an optimizer."""

    name: str
    """Its name in the model."""
    layout: Layout
    parameter: nn.Parameter
    """The model's own."""
    tensor: nn.Parameter
    """What the optimizer updates: this rank's piece, in the parameter's memory. The parameter itself where it is no
    DTensor."""

    def alias(self) -> None:
        """Point the twin at the parameter's memory, which may have moved since (`model.to`, loading)."""
        if self.tensor is not self.parameter:
            local = _local(self.parameter.detach())
            if local.data_ptr() != self.tensor.data_ptr() or local.device != self.tensor.device:
                self.tensor.data = local

    def take_gradient(self) -> None:
        """Give the twin this rank's piece of the gradient; nothing is copied."""
        gradient = self.parameter.grad
        # A rank that holds no rows of a parameter has nothing to update, and kernels may refuse empty tensors.
        empty = not self.tensor.numel()
        if self.tensor is not self.parameter:
            self.tensor.grad = None if gradient is None or empty else _local(gradient)


@dataclass(frozen=True, eq=False)
class Twins:
    """The parameters of an optimizer on local tensors, by the identity of what its groups hold."""

    handle: ShardedModel
    by_tensor: dict[int, Twin]

    def __iter__(self) -> Iterator[Twin]:
        return iter(self.by_tensor.values())

    @property
    def owned(self) -> list[Twin]:
        """The twins whose parameters this rank holds: all, but in a pipeline those of its stages."""
        place = self.handle.pipeline
        return [twin for twin in self if place is None or place.owns(twin.name)]

    def of(self, group: dict[str, Any]) -> list[Twin]:
        """The twins of one of the optimizer's groups, in its order."""
        return [self.by_tensor[id(tensor)] for tensor in group["params"]]


def on_local(optimizer: Optimizer, handle: ShardedModel) -> None:
    """Let an optimizer that was made on a spread model's parameters work on this rank's pieces of them, in place.

    Groups keep their settings and order, state that is there already goes along, and schedules, hooks and
    `state_dict()` keep working. A group that a Trainer cut up because its DTensors lie on several meshes is one again:
    groups are the same under any strategy. `zero_grad` clears the model's gradients as well. A second call changes
    nothing.

    Raises IntegrationError when a parameter is not the model's (the optimizer was made before the model was spread), or
    when the optimizer looks at more than one element, or is not known not to, and a parameter is split.
    """
    inner, known = find_twins(optimizer)
    if known is not None:
        if known.handle is not handle:
            raise IntegrationError("this optimizer has another model's parameters; make one for each model")
        return
    named = {id(p.parameter): p for p in handle.parameters()}
    twins: list[Twin] = []
    for parameter in (p for group in inner.param_groups for p in group["params"]):
        found = named.get(id(parameter))
        if found is None:
            raise IntegrationError(
                f"{type(inner).__name__} has a parameter of shape {list(parameter.shape)} that is none of the spread "
                "model's; make the optimizer after the model was spread: in place of optimizers=(optimizer, …) give "
                "the Trainer optimizer_cls_and_kwargs=(class, settings), or a create_optimizer of your own"
            )
        twin = parameter
        if isinstance(parameter, DTensor):
            twin = nn.Parameter(_local(parameter.detach()), parameter.requires_grad)
        twins.append(Twin(found.name, found.layout, parameter, twin))
    _refuse(inner, twins)
    exchanged = {id(twin.parameter): twin.tensor for twin in twins}
    inner.param_groups[:] = _joined(inner.param_groups)
    for group in inner.param_groups:
        group["params"] = [exchanged[id(parameter)] for parameter in group["params"]]
    for twin in twins:
        # Some make their state when they are made: Adagrad does.
        if twin.tensor is not twin.parameter and twin.parameter in inner.state:
            state = inner.state.pop(twin.parameter)
            inner.state[twin.tensor] = {
                key: _local(value) if isinstance(value, Tensor) else value for key, value in state.items()
            }
    _attach(inner, Twins(handle, {id(twin.tensor): twin for twin in twins}))


class ScheduledOptimizer:
    """An optimizer of PyTorch's in the place of a step's own: it takes the share of its rate from the schedule."""

    def __init__(self, make: Callable[[Any], Optimizer], handle: ShardedModel) -> None:
        """`make`: of parameters. Raises IntegrationError as `on_local`."""
        self.inner = make([one for one in handle.model.parameters() if one.requires_grad])
        on_local(self.inner, handle)
        self._rates = [group["lr"] for group in self.inner.param_groups]
        self._scale = 1.0

    def step(self, lr_scale: float) -> None:
        """Update every parameter from its gradient. Rates are left alone while the scale is 1 in each step, so that a
        scheduler of PyTorch's may set them."""
        if lr_scale != 1 or self._scale != 1:
            for group, rate in zip(self.inner.param_groups, self._rates, strict=True):
                group["lr"] = rate * lr_scale
        self._scale = lr_scale
        self.inner.step()


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group without the keys that list its parameters."""
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}


def _joined(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups; neighbours with equal settings and parameters on different meshes are one: newer releases of
    Transformers (5.23, not 5.6) cut a group up so.
    """
    found: list[dict[str, Any]] = []
    for group in groups:
        last = found[-1] if found else None
        if last is None or settings_of(last) != settings_of(group) or _meshes(last) & _meshes(group):
            found.append(group)
            continue
        for key in _OF_PARAMETERS:
            if key in last:
                last[key] = [*last[key], *group[key]]
    return found


def _meshes(group: dict[str, Any]) -> set[Any]:
    """The device meshes of a group's parameters, with None for those that are no DTensors."""
    return {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]} or {None}


def find_twins(optimizer: Any) -> tuple[Optimizer, Twins | None]:
    """The optimizer inside of wrappers such as Accelerate's, and its twins; None before `on_local`."""
    inner = optimizer
    while _ATTRIBUTE not in vars(inner) and isinstance(getattr(inner, "optimizer", None), Optimizer):
        inner = inner.optimizer
    return inner, vars(inner).get(_ATTRIBUTE)


def _attach(optimizer: Optimizer, twins: Twins) -> None:
    def before(stepping: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first argument is the optimizer itself.
        if any(given is not None and given is not stepping for given in (*args, *kwargs.values())):
            raise IntegrationError(
                "step(closure) computes gradients inside of the step, which a spread model cannot; compute them "
                "before and call step()"
            )
        for twin in twins:
            twin.alias()
            twin.take_gradient()

    def after(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for twin in twins:
            if twin.tensor is not twin.parameter:
                twin.tensor.grad = None

    own_zero_grad = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        own_zero_grad(set_to_none)
        for twin in twins:
            gradient = twin.parameter.grad
            if gradient is None or twin.tensor is twin.parameter:
                continue
            if set_to_none:
                twin.parameter.grad = None
            else:
                _local(gradient).zero_()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    vars(optimizer)[_ATTRIBUTE] = twins


def _refuse(optimizer: Optimizer, twins: list[Twin]) -> None:
    if type(optimizer) in _elementwise:
        return
    for twin in twins:
        axes = [axis for axis in twin.layout.split_axes if twin.layout.mesh.size(axis) > 1]
        if axes:
            name = type(optimizer).__name__
            raise IntegrationError(
                f"the optimizer {name} may look at more than one element of a parameter at once, and {twin.name!r} is "
                f"split over {' and '.join(axes)}; use one that goes element by element (optim: adamw_torch, "
                "adamw_torch_fused, sgd, adagrad, rmsprop), or axes that split no parameter (replicate); if "
                f"{name} does go element by element, say hyper_parallel.integration.local_optimizer.elementwise({name})"
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_to_norm(handle: ShardedModel, max_norm: float, norm_type: float) -> Tensor:
    """The 2-norm of the whole gradient, fp32 [], before it is clipped to `max_norm`; an infinite one clips nothing.

    A collective. Raises IntegrationError for a norm other than the 2-norm.
    """
    if norm_type != 2:
        raise IntegrationError(f"gradients are clipped by their 2-norm; got norm_type={norm_type}")
    norm = handle.grad_norm()
    if math.isfinite(max_norm):
        handle.clip(norm, max_norm)
    return norm
