"""PyTorch's FSDP2; hooks of parameters, and gradients of DTensors whose shards differ in size."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from hyper_parallel.compat import collectives

Move = Callable[[torch.Tensor], torch.Tensor]


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None,
    reduce: torch.dtype | None,
    reshard_after_forward: bool,
    ignored: Iterable[nn.Parameter] = (),
    dims: Mapping[nn.Parameter, int] | None = None,
    gather: Move | None = None,
    scatter: Move | None = None,
) -> None:
    """Apply FSDP2 to the parameters that no inner call has sharded; gradients are summed, not averaged.

    `mesh` is [shard], or [replicate, shard]. `compute` and `reduce`: None keeps the dtype of the stored parameters.
    `dims`: the dim that is sharded, by parameter (default 0); the mesh must divide any dim other than 0.

    `gather` and `scatter` replace the all-gather ([d] to [n · d]) and the summing reduce-scatter ([n · d] to [d]) over
    shard. On the CPU the default reduce-scatter uses the kernel of `compat.gloo`, whose sums are bitwise equal to those
    of a captured step.
    """
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False),
        ignored_params=set(ignored) or None,
        shard_placement_fn=lambda parameter: Shard((dims or {}).get(parameter, 0)),
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # Without this a factor of 1 becomes a scaled sum, which only one of the collective libraries has.
    module.set_force_sum_reduction_for_comms(True)
    if gather is not None:
        module.set_custom_all_gather(_Gather(gather))
    if scatter is None and mesh.device_type == "cpu":
        group = mesh.get_group(mesh.ndim - 1)
        scatter = partial(collectives.reduce_scatter, group=group.group_name, size=group.size())
    if scatter is not None:
        module.set_custom_reduce_scatter(_Scatter(scatter))


def fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 holds some of the module's parameters."""
    return any(isinstance(inner, FSDPModule) for inner in module.modules())


def _fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    return (inner for inner in module.modules() if isinstance(inner, FSDPModule))


def _groups(module: nn.Module) -> Iterator[Any]:
    """The parameter groups of all fully sharded modules in a module."""
    return (group for inner in _fsdp_modules(module) for group in groups_of(inner))


def _parameters(module: nn.Module) -> Iterator[Any]:
    """FSDP2's record of each parameter of these groups."""
    return (parameter for group in _groups(module) for parameter in group.fsdp_params)


def begin_micro_batch(module: nn.Module, *, last: bool, keep_parameters: bool, keep_gradients: bool) -> None:
    """What the next backward pass leaves behind; `last` is the one before the optimizer's update.

    `keep_parameters`: gathered parameters stay until the last. `keep_gradients`: gradients stay whole until the last,
    and are reduced then only. Else each backward pass scatters its gradients over the shards; over the copies of a
    shard (HSDP) they are summed in the last.
    """
    for inner in _fsdp_modules(module):
        inner.set_requires_gradient_sync(last or not keep_gradients, recurse=False)
        inner.set_requires_all_reduce(last, recurse=False)
        inner.set_reshard_after_backward(last or not keep_parameters, recurse=False)
        inner.set_is_last_backward(last)


def gradients_are_whole(module: nn.Module) -> bool:
    """Whether a backward pass that has just ended reduced gradients over all ranks, as the last of a step does."""
    return all(group.reduce_grads and group.all_reduce_grads for group in _groups(module))


def shards(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name to FSDP2's shard of a parameter, also while modules have the gathered one; after a first forward pass."""
    return {parameter._param_fqn: parameter.sharded_param for parameter in _parameters(module)}


def hooked_shards(module: nn.Module) -> dict[int, list[Callable[[torch.Tensor], torch.Tensor | None]]]:
    """Identity of FSDP2's shard of a parameter to the hooks of its gradient, which FSDP2 sets without calling them."""
    sharded = [parameter.sharded_param for parameter in _parameters(module)]
    return {id(shard): [*shard._backward_hooks.values()] for shard in sharded if shard._backward_hooks}


def free_gathered(module: nn.Module) -> None:
    """Give up gathered parameters that a forward pass without a backward pass left behind."""
    for inner in _fsdp_modules(module):
        inner.reshard()


_KEPT: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models inside of `gathered_between_passes`."""


@contextlib.contextmanager
def gathered_between_passes(model: nn.Module) -> Iterator[None]:
    """Inside, forward passes without gradients leave weights gathered for the next one; at the end they are freed."""
    _KEPT.add(model)
    try:
        yield
    finally:
        _KEPT.discard(model)
        free_gathered(model)


def keep_gathered_fresh(model: nn.Module) -> None:
    """Have no forward pass of the root read weights that were gathered before an update of their shards.

    FSDP2 keeps the root's gathered weights, and at some levels all, until a backward pass has used them. After a
    forward pass without one an optimizer updates the shards, the next forward pass would read the gathered weights,
    and `zero_grad` and `parameters()` would meet these.
    """
    noted: list[tuple[nn.Parameter, int]] = []
    updated = False

    def step(*_: Any) -> None:
        nonlocal updated
        updated = True

    def before(module: nn.Module, *_: Any) -> None:
        nonlocal updated
        if updated or any(_version(shard) != version for shard, version in noted):
            free_gathered(module)
        noted.clear()
        updated = False

    def after(module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled() or module in _KEPT:
            noted[:] = [(shard, _version(shard)) for shard in _shards_of_gathered(module)]
        else:
            free_gathered(module)

    # Fused optimizers, and those over lists of tensors, write DTensors without raising their versions.
    handle = register_optimizer_step_post_hook(step)
    weakref.finalize(model, handle.remove)
    # Before FSDP2's own hook gathers, and after the one that may free again.
    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)


def _shards_of_gathered(module: nn.Module) -> list[nn.Parameter]:
    return [
        parameter.sharded_param
        for group in _groups(module)
        if group.is_unsharded
        for parameter in group.fsdp_params
    ]


def _version(shard: nn.Parameter) -> int:
    """How often a shard was written: an optimizer writes the DTensor, others the tensor in it."""
    assert isinstance(shard, DTensor)
    return shard._version + shard._local_tensor._version


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """The attributes that a user set on a parameter."""
    return {key: value for key, value in vars(parameter).items() if not key.startswith("_")}


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Exchange every parameter, once each where modules share one, and tell FSDP2 about it. What the user set on one
    as an attribute stays."""
    replaced: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in owner._parameters.items():
            if old is not None:
                if id(old) not in replaced:
                    replaced[id(old)] = make(old)
                    vars(replaced[id(old)]).update(attributes_of(old))
                owner._parameters[name] = replaced[id(old)]
    for parameter in _parameters(module):
        parameter.reset_sharded_param()


def groups_of(module: FSDPModule) -> list:  # type: ignore[type-arg]
    """The parameter groups of one fully sharded module, under whichever name this torch keeps them."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class _ByFunction:
    """A collective of FSDP2's that a function carries out."""

    def __init__(self, move: Move) -> None:
        self.move = move

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_ByFunction, AllGather):
    """FSDP2's all-gather by a function. It has run when the call returns, on the stream that FSDP2 calls it on."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(self.move(input_tensor))


class _Scatter(_ByFunction, ReduceScatter):
    """FSDP2's reduce-scatter by a function that sums."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"gradients are summed, not reduced by {op}"
        output_tensor.copy_(self.move(input_tensor))


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


# Gradients of DTensors whose shards differ in size.
#
# PyTorch takes the strides of the whole gradient from one shard, and copies it where they differ from the parameter's:
# into shards of the sizes that it expects, which are not those of a fused weight. PyTorch 2.11 gathers them there.


def local_for_compute(parameter: DTensor) -> torch.Tensor:
    """The shard of a parameter; its gradient has the parameter's placements, shape and strides."""
    local: torch.Tensor = _Local.apply(parameter)
    return local


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.whole = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        local = parameter.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        mesh, placements, shape, stride = ctx.whole
        return DTensor.from_local(
            gradient.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )


def keep_gradient_sharded(parameter: nn.Parameter) -> None:
    """Have a DTensor's gradient in the placements of its values, as newer releases have it."""
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(_sharded)


def _sharded(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and gradient.placements != parameter.placements
    ):
        # From whole tensors to shards: nothing is sent.
        parameter.grad = gradient.redistribute(placements=parameter.placements)
