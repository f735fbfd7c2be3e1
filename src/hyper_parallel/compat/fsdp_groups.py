"""Parameter groups of FSDP2: the gather and the reduction of one, announced before it happens, held back, or added.

FSDP2 gathers a group when its module runs and reduces its gradients when autograd has passed through it, so that the
order of collectives is that of each rank's own code. Whoever has to know that order, or to change it, does so here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.tensor import DTensor

from hyper_parallel.compat.dispatch import leaves_of, mapped
from hyper_parallel.compat.fsdp import groups_of

Announce = Callable[["ParameterGroup"], None]


class BackwardFlags(NamedTuple):
    """Flags of a group's backward pass."""

    reduce: bool
    """Reduce the gradients over the shards."""
    reshard: bool
    """Free the gathered parameters."""


class GroupParameter(NamedTuple):
    """One parameter of a group, where its first owner has it."""

    owner: nn.Module
    own: str
    state: Any
    """FSDP2's FSDPParam."""

    @property
    def gathered(self) -> nn.Parameter | None:
        """The gathered parameter, whose memory may be freed; None before it was first gathered."""
        return getattr(self.state, "_unsharded_param", None)

    @property
    def sharded(self) -> nn.Parameter:
        """This rank's shard, a DTensor, which the optimizer updates."""
        sharded: nn.Parameter = self.state.sharded_param
        return sharded

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that is not reduced yet."""
        gathered = self.gathered
        held = self.state.unsharded_accumulated_grad is not None
        return held or (gathered is not None and gathered.grad is not None)

    def store(self) -> None:
        """Write the values of the gathered parameter to this rank's shard."""
        gathered, dim = self.gathered, self.state.fsdp_placement.dim
        assert gathered is not None
        local = self.sharded.detach()
        assert isinstance(local, DTensor)
        shards, rank = self.state.mesh_info.shard_mesh_size, self.state.mesh_info.shard_mesh_rank
        whole = gathered.detach()
        if isinstance(whole, DTensor):
            whole = whole.to_local()
        chunks = whole.chunk(shards, dim)
        if rank < len(chunks):
            local.to_local().copy_(chunks[rank])


class ParameterGroup:
    """The parameters that FSDP2 gathers together when `module` runs."""

    def __init__(self, name: str, module: nn.Module, group: Any) -> None:
        self.name, self.module, self._group = name, module, group
        self.parameters = [
            GroupParameter(one._module_info.module, one._module_info.param_name, one)
            for one in group.fsdp_params
        ]
        self._unshard: Callable[..., None] = group.unshard
        self._post_backward: Callable[..., None] = group.post_backward

    @property
    def is_gathered(self) -> bool:
        """Whether the modules have the gathered parameters now."""
        return bool(self._group.is_unsharded)

    @property
    def trained(self) -> list[GroupParameter]:
        """The parameters that take gradients."""
        return [one for one in self.parameters if one.sharded.requires_grad]

    def announce(self, gathers: Announce | None, reduces: Announce) -> None:
        """Call `gathers` before each gather and `reduces` before each reduction, which they may do themselves or hold
        back. A reduction is one of every parameter that is trained, with zeros where there is no gradient."""
        group = self._group

        def unshard(async_op: bool = False) -> None:
            if group.is_unsharded or group._all_gather_result is not None:
                return
            if gathers is not None:
                gathers(self)
            self._unshard(async_op)

        def post_backward(*_: Any) -> None:
            if group.reduce_grads and self._was_gathered:
                reduces(self)
                if group.reduce_grads:
                    self._complete()
            self._post_backward()

        group.unshard, group.post_backward = unshard, post_backward
        group._register_post_backward_hook = functools.partial(_reduce_after, group)

    def gather(self) -> None:
        """Gather now, unannounced."""
        self._unshard(False)
        self._group.wait_for_unshard()

    def finish_gather(self) -> None:
        """Wait for a gather that was begun ahead of its use."""
        self._group.wait_for_unshard()

    def free(self) -> None:
        """Give up the gathered parameters."""
        self._group._to_sharded()

    def keep_after_forward(self) -> None:
        """From now on the gathered parameters stay after the module's forward pass."""
        self._group.post_forward_mesh_info = None

    @property
    def flags(self) -> BackwardFlags:
        """Flags of the next backward pass."""
        return BackwardFlags(self._group.reduce_grads, self._group.reshard_after_backward)

    @flags.setter
    def flags(self, flags: BackwardFlags) -> None:
        self._group.reduce_grads, self._group.reshard_after_backward = flags

    @property
    def sums_copies(self) -> bool:
        """Whether the next backward pass sums gradients over the copies of a shard; else a later one does."""
        return bool(self._group.all_reduce_grads)

    def reduce(self) -> None:
        """Reduce now, unannounced, what gradients there are; zeros for the others."""
        if self._was_gathered:
            self._complete()
            self._post_backward()

    def settle(self) -> None:
        """After reductions outside of FSDP2's own order: wait for them, and be ready for the next pass."""
        group = self._group
        group._training_state = TrainingState.IDLE
        group.finalize_backward()
        states = getattr(group.comm_ctx, "reduce_scatter_states", [])
        for state in states:
            if state.event is not None:
                group.device_handle.current_stream().wait_event(state.event)
        states.clear()

    @property
    def _was_gathered(self) -> bool:
        return any(one.gathered is not None for one in self.parameters)

    def _complete(self) -> None:
        """Gradients of zero where there are none; all in one dtype, as FSDP2 wants them."""
        accumulated = any(one.state.unsharded_accumulated_grad is not None for one in self.trained)
        for one in self.trained:
            state, gathered = one.state, one.gathered
            assert gathered is not None
            if not one.has_gradient:
                zeros = torch.zeros_like(gathered).detach()
                if accumulated:
                    state.unsharded_accumulated_grad = zeros.to(state.reduce_dtype or zeros.dtype)
                else:
                    gathered.grad = zeros
            elif accumulated and state.unsharded_accumulated_grad is None:
                state.to_accumulated_grad_if_needed()


def _reduce_after(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Have autograd reduce a group when it has passed the tensors that its module is given.

    FSDP2's own goes into lists and dicts, and so hands copies of them to a module, which may put something in.
    """
    tensors: list[Tensor] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            tensors.append(value)
            return _Mark(len(tensors) - 1)
        return tuple(map(marked, value)) if type(value) is tuple else value

    def filled(value: Any) -> Any:
        if isinstance(value, _Mark):
            return passed[value.place]
        return tuple(map(filled, value)) if type(value) is tuple else value

    if not torch.is_grad_enabled():
        return args, kwargs
    with_marks = marked(args), {key: marked(value) for key, value in kwargs.items()}
    if not tensors:
        return args, kwargs
    passed = RegisterPostBackwardFunction.apply(group, *tensors)
    return filled(with_marks[0]), {key: filled(value) for key, value in with_marks[1].items()}


class _Mark(NamedTuple):
    """Stands where a tensor was."""

    place: int


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """The model's groups, those of its root first, in the order of its modules."""
    return [
        ParameterGroup(name, model.get_submodule(name), group)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        for group in groups_of(module)
    ]


def after_backward(model: nn.Module, call: Callable[[], None]) -> None:
    """Call a function at the end of every backward pass, when FSDP2 has done all that it does."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        original = state._root_post_backward_final_callback

        def final(original: Callable[[], None] = original) -> None:
            original()
            call()

        state._root_post_backward_final_callback = final


class _Watched(dict[str, Any]):
    """The parameters of a module; calls `looked_up` when one is looked up by name."""

    looked_up: Callable[[], None]

    def __getitem__(self, name: str) -> Any:
        self.looked_up()
        return super().__getitem__(name)

    def items(self) -> Any:
        self.looked_up()
        return super().items()

    def values(self) -> Any:
        self.looked_up()
        return super().values()


def watch_lookups(group: ParameterGroup, looked_up: Announce) -> None:
    """Call a function before code takes parameters of the group from a module (`module.weight`, `parameters()`)."""
    for owner in {id(one.owner): one.owner for one in group.parameters}.values():
        watched = _Watched(owner._parameters)
        watched.looked_up = functools.partial(looked_up, group)
        owner.__dict__["_parameters"] = watched


class _WatchedParameter(nn.Parameter):
    """A gathered parameter whose `.data` tells that it is taken, and is written in place."""

    taken: Callable[[Tensor], None]

    @property
    def data(self) -> Tensor:
        self.taken(self)
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        self.taken(self)
        # FSDP2 gathers into this memory: another one would keep its values for ever.
        torch.Tensor.data.__get__(self).copy_(value)  # type: ignore[attr-defined]


def watch_data(parameter: nn.Parameter, taken: Callable[[Tensor], None]) -> None:
    """Call a function before somebody takes or sets the `.data` of a gathered parameter, past its version counter."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = _WatchedParameter
        assert isinstance(parameter, _WatchedParameter)
        parameter.taken = taken


class _UnitOutput(torch.autograd.Function):
    """A view that a unit returns, as a tensor that PyTorch does not let anyone change in place.

    FSDP2 gathers again when autograd comes to a unit's output; an in-place change of a view drops that hook.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


CHANGED_OUTPUT = "Output 0 of _UnitOutput is a view"
"""What PyTorch's error says where a unit's output is changed in place."""


def unchanged_in_place(output: Any) -> Any:
    """A unit's output, whose tensors raise an error where they are views and are changed in place."""
    if not any(isinstance(leaf, Tensor) and _is_view(leaf) for leaf in leaves_of(output)):
        return output
    return mapped(
        lambda leaf: _UnitOutput.apply(leaf) if isinstance(leaf, Tensor) and _is_view(leaf) else leaf, output
    )


def _is_view(x: Tensor) -> bool:
    return x.requires_grad and x._base is not None
