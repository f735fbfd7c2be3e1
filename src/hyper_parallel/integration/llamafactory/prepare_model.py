"""`fsdp2_prepare_model` for LlamaFactory's main branch, in place of Accelerate's.

That loop takes the mean of the ranks' gradients for granted. Ours are sums over the data ranks of what each rank's loss
gives, and over `context` and `tensor`, whose ranks have one loss in common, of its parts:

    mean over ranks of ∂L_r  =  (1 / data ranks) · Σ over data ranks of ∂L_r

so that the gradient is divided as it enters the model, at what the model returned. Every parameter's gradient is linear
in it, whichever axes the parameter lies on.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.dispatch import mapped
from hyper_parallel.errors import IntegrationError
from hyper_parallel.graph.step_context import Draw, current_step
from hyper_parallel.integration.llamafactory.arguments import DTYPES, check_device, strategy_from_arguments
from hyper_parallel.integration.llamafactory.context_parallel import LossAlone, call_with_positions_split
from hyper_parallel.integration.local_optimizer import clip_to_norm, find_twins, on_local
from hyper_parallel.integration.parallel_run import ParallelRun, strategy_of, world_size
from hyper_parallel.integration.streamed_sharding import parallelize_streamed
from hyper_parallel.integration.trainer_arguments import check_model
from hyper_parallel.integration.versions import check
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.shard.loss.causal_lm import root_of
from hyper_parallel.strategy import Strategy

check("torch", "transformers", "accelerate")

_spreads: weakref.WeakKeyDictionary[nn.Module, ParallelRun] = weakref.WeakKeyDictionary()
"""The models that were prepared in this process."""


class HSDPModule:
    """Marks a model that `fsdp2_prepare_model` spread, and carries its calls. Never made by itself."""

    def set_is_last_backward(self, last: bool) -> None:
        """Say whether the next backward pass is the step's last."""
        if isinstance(self, FSDPModule):
            super().set_is_last_backward(last)  # type: ignore[misc]

    def set_requires_gradient_sync(self, sync: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward pass is the step's last, after which gradients are whole.

        Before it they are what `memory.shard` leaves. `recurse=False` is FSDP2's: this module's own parameters.
        """
        if not recurse:
            if isinstance(self, FSDPModule):
                super().set_requires_gradient_sync(sync, recurse=False)  # type: ignore[misc]
            return
        assert isinstance(self, nn.Module)
        level = sharded(self).strategy.memory.shard
        fsdp.begin_micro_batch(
            self, last=sync, keep_parameters=level != "parameters", keep_gradients=level == "optimizer"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; the gradient of the mean over ranks goes back through it."""
        assert isinstance(self, nn.Module)
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        root = root_of(self)
        if root is not None and root.request is not None:
            # The loss of the call around this one.
            return call(*args, **kwargs)
        spread = _spreads[self]
        with replace(current_step(), draw=_draw(self, spread.handle, args, kwargs)).installed():
            if spread.handle.mesh.size("context") > 1:
                output = call_with_positions_split(call, spread.handle, args, kwargs)
            else:
                output = call(*args, **kwargs)
        return _averaged(output, spread.data_ranks)


def fsdp2_prepare_model(accelerator: Any, model: nn.Module, hp_args: Any) -> nn.Module:
    """Spread the model as the arguments and Accelerate's FSDP2 plugin say. Returns the same object.

    Parameters keep their names; the gradients of a backward pass through what it returns are the mean over ranks. A
    model that was prepared is returned as it is. A collective.

    Raises IntegrationError, or StrategyError, for what does not fit the model, the ranks or the plugin.
    """
    if isinstance(model, HSDPModule):
        return model
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        raise IntegrationError("a compiled model cannot be spread; leave torch_compile out")
    check_model(model)
    strategy = _strategy(model, accelerator, hp_args)
    plugin = accelerator.state.fsdp_plugin
    from_rank_0 = bool(getattr(plugin, "cpu_ram_efficient_loading", False))
    spread = ParallelRun(parallelize_streamed(model, strategy, accelerator.device, from_rank_0=from_rank_0))
    cls = type(model)
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    # Transformers looks up classes by name, and FSDP2 has put its own before the model's.
    model.__class__ = type(cls.__name__.removeprefix("FSDP"), (HSDPModule, cls), body)
    _spreads[model] = spread
    _leave_clipping_to_the_loop()
    return model


def _strategy(model: nn.Module, accelerator: Any, hp_args: Any) -> Strategy:
    check_device(hp_args, accelerator.device.type)
    given = strategy_from_arguments(hp_args, world_size())
    strategy = strategy_of(given, model, world=world_size(), batch=1, length=0).strategy
    axes = strategy.axes
    if axes.pipeline > 1:
        raise IntegrationError(
            "this trainer of LlamaFactory runs the forward and the backward pass of each batch itself, and the stages "
            "of a pipeline run those of all micro-batches together; set pp_size to 1, or use LlamaFactory 0.9.5, whose "
            "trainer is HyperParallel's"
        )
    if axes.tensor_x * axes.tensor_y > 1:
        raise IntegrationError(
            "this trainer of LlamaFactory gives every process rows of its own, but the ranks of tp_size have to see "
            "the same ones; set tp_size to 1, or use LlamaFactory 0.9.5, whose trainer is HyperParallel's"
        )
    if axes.context != hp_args.cp_size:
        raise IntegrationError(
            f"the strategy's axes.context is {axes.context}, but this trainer of LlamaFactory cuts rows for "
            f"hyper_parallel_cp_size {hp_args.cp_size}; make them the same"
        )
    if strategy.memory.device is not None or hp_args.activation_mode == "swap":
        raise IntegrationError(
            "a memory budget (memory, activation_mode: swap) is not kept in this trainer of LlamaFactory; use "
            "activation_mode: recompute, or LlamaFactory 0.9.5"
        )
    return with_plugin(strategy, model, accelerator, hp_args)


def hsdp_sync_stream() -> None:
    """Wait until gradients are reduced. When `backward` returns, the current stream waits for them already."""


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
    """The 2-norm of the whole gradient, before it is clipped to `max_norm`; the same on every rank. A collective.

    `parameters`: those of a prepared model. Raises IntegrationError for another norm, and when a parameter of the model
    that has a gradient is not among them.
    """
    given = list(parameters)
    handle = _handle_of(given)
    known = {id(parameter) for parameter in given}
    left = [p.name for p in handle.parameters() if p.grad is not None and id(p.parameter) not in known]
    if left:
        raise IntegrationError(
            f"the norm is that of all gradients, and {left[0]} and {len(left) - 1} more were not given; call it with "
            "model.parameters()"
        )
    return clip_to_norm(handle, max_norm, norm_type)


def wrap_optimizer_with_skip_dtensor_dispatch(optimizer: Any) -> None:
    """Let the optimizer's `step` work on this rank's pieces, without DTensor's dispatch. A second call changes nothing.

    The pieces are found when they are needed first: Accelerate exchanges the optimizer's parameters for the spread
    model's after this call.
    """
    inner, _ = find_twins(optimizer)
    if getattr(inner.step, "_hyper_parallel", False):
        return
    step = inner.step

    def on_pieces(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        localised(self)
        return step(*args, **kwargs)

    on_pieces._hyper_parallel = True  # type: ignore[attr-defined]
    # A bound method, as schedules expect who count the steps.
    inner.step = types.MethodType(on_pieces, inner)  # type: ignore[method-assign]


def localised(optimizer: Any) -> ShardedModel:
    """The handle of the prepared model whose parameters the optimizer has; it works on this rank's pieces from here on.

    Raises IntegrationError where the parameters are none of a prepared model's.
    """
    inner, twins = find_twins(optimizer)
    if twins is not None:
        return twins.handle
    handle = _handle_of([p for group in inner.param_groups for p in group["params"]])
    on_local(inner, handle)
    return handle


def _handle_of(parameters: list[Tensor]) -> ShardedModel:
    """The handle of the prepared model that has the first of the parameters."""
    for model, spread in _spreads.items():
        if any(parameter is parameters[0] for parameter in model.parameters()):
            return spread.handle
    raise IntegrationError(
        "these parameters are none of a prepared model's; call fsdp2_prepare_model(accelerator, model, hp_args) first, "
        "and give the parameters of what it returns"
    )


def _leave_clipping_to_the_loop() -> None:
    """Keep Transformers' Trainer from clipping a prepared model's gradients by itself.

    Transformers 5.12 and later do where parameters lie on several meshes, as experts may, and take the norm of what is
    no DTensor for that of the whole tensor. The loop's own call goes to `clip_grad_norm_`, which knows every layout.
    """
    import transformers.trainer as trainer

    homes = [trainer]
    # Transformers 5.17 takes it from there when it is called, 5.23 when it is imported.
    with contextlib.suppress(ImportError):
        import transformers.trainer_optimizer as trainer_optimizer

        homes.append(trainer_optimizer)
    for home in homes:
        own = getattr(home, "has_mixed_dtensor", None)
        if own is not None and not hasattr(own, "_hyper_parallel"):
            home.has_mixed_dtensor = _of_others(own)


def _of_others(own: Callable[[Iterable[Any]], bool]) -> Callable[[Iterable[Any]], bool]:
    """`own`, which does not hold for gradients of prepared models."""

    def has_mixed_dtensor(gradients: Iterable[Any]) -> bool:
        targets = list(gradients)
        prepared = {id(p.grad) for model in _spreads for p in model.parameters() if p.grad is not None}
        return not any(id(gradient) in prepared for gradient in targets) and own(targets)

    has_mixed_dtensor._hyper_parallel = True  # type: ignore[attr-defined]
    return has_mixed_dtensor


def _averaged(output: Any, ranks: int) -> Any:
    """The model's output, with gradients divided by the number of ranks on their way back into the model."""
    if ranks == 1 or not torch.is_grad_enabled():
        return output
    if isinstance(output, LossAlone):
        return LossAlone(loss=_averaged(output.loss, ranks))
    return mapped(
        lambda leaf: (
            _Averaged.apply(leaf, ranks) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
        ),
        output,
    )


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: int) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.ranks = ranks
        # A Trainer scales the loss in place, which a view of it would not allow.
        return x.clone() if x.dim() == 0 else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        return gradient / ctx.ranks, None


def _draw(model: nn.Module, handle: ShardedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    """Random numbers of this call: its number, and rows that distinguish it from those of other data ranks."""
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()), None)
    rows = first.size(0) if first is not None else 1
    calls = model.__dict__.setdefault("_hyper_parallel_calls", 0)
    if model.training:
        model.__dict__["_hyper_parallel_calls"] = calls + 1
    # Accelerate's loaders give data rank d the rows d·B, d·B + 1, … of a step's.
    begin = handle.data_index * rows
    return Draw(torch.initial_seed() & 0xFFFFFFFF, calls, torch.arange(begin, begin + rows))


# Accelerate's FSDP2 plugin as a Strategy, for LlamaFactory's main branch.
#
# | The plugin | Ours |
# |---|---|
# | `mixed_precision_policy`: `param_dtype`, `reduce_dtype` | `precision.compute`, `reduce`, unless the arguments say |
# | Accelerate's `mixed_precision` | parameters are kept in float32; without it in the dtype that the model has |
# | `reshard_after_forward` | `memory.reshard_after_forward`, unless the arguments say |
# | `activation_checkpointing` | `memory.recompute: layer`, in place of Accelerate's wrappers |
# | `auto_wrap_policy` | nothing: a group of parameters is a layer |
# | `cpu_offload`, `ignored_modules` | refused |

_WRAPPED = "_checkpoint_wrapped_module"


def with_plugin(strategy: Strategy, model: nn.Module, accelerator: Any, arguments: Any) -> Strategy:
    """The strategy, with what the plugin says beside it.

    Raises IntegrationError for what the plugin asks and a Strategy cannot say.
    """
    plugin = accelerator.state.fsdp_plugin
    if getattr(plugin, "cpu_offload", None) and type(plugin.cpu_offload).__name__ != "OffloadPolicy":
        raise IntegrationError(
            "FSDP's offloading of parameters (fsdp_offload_params) is not taken over; switch it off, and say what a "
            'step may hold: memory: {"device": …, "host": …} in hyper_parallel_args'
        )
    if getattr(plugin, "ignored_modules", None):
        raise IntegrationError(
            "FSDP's ignored_modules are not taken over: every parameter is spread; leave fsdp_ignored_modules out"
        )
    memory = strategy.memory
    # FSDP1's strategies are strings here; only FSDP2's False says that gathered parameters stay.
    keeps = getattr(plugin, "reshard_after_forward", None) is False
    if arguments.reshard_after_forward is None and memory.shard == "parameters" and keeps:
        memory = memory.model_copy(update={"reshard_after_forward": False})
    if without_checkpoint_wrappers(model):
        memory = memory.model_copy(update={"recompute": "layer"})
    return strategy.model_copy(
        update={"memory": memory, "precision": _precision(strategy, model, accelerator, arguments)}
    )


def _precision(strategy: Strategy, model: nn.Module, accelerator: Any, arguments: Any) -> Any:
    mixed = str(getattr(accelerator, "mixed_precision", "no"))
    if mixed not in ("no", "bf16"):
        raise IntegrationError(f"mixed precision {mixed!r} is not supported; use bf16: true, or neither")
    policy = getattr(accelerator.state.fsdp_plugin, "mixed_precision_policy", None)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    kept = "float32" if mixed != "no" else _name(own)
    compute = arguments.param_dtype or getattr(policy, "param_dtype", None) or kept
    reduce = arguments.reduce_dtype or getattr(policy, "reduce_dtype", None) or compute
    given = {"param": kept, "compute": _name(compute), "reduce": _name(reduce)}
    return strategy.precision.model_copy(update=given)


def _name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        known = " and ".join(dict.fromkeys(DTYPES.values()))
        raise IntegrationError(f"parameters, arithmetic and gradients may be {known}; got {name}")
    return DTYPES[name]


def without_checkpoint_wrappers(model: nn.Module) -> bool:
    """Take Accelerate's checkpoint wrappers out of the model; whether there were any."""
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, _WRAPPED)]
    for name, wrapper in found:
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, getattr(wrapper, _WRAPPED))
    return bool(found)
