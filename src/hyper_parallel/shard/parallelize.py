"""`parallelize`: applies a strategy to a model in place."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import is_lazy

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.fsdp import keep_gradient_sharded
from hyper_parallel.compat.local_tensor import is_per_rank, per_rank
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Layout
from hyper_parallel.report.wait_line import waiting
from hyper_parallel.shard.context import ContextRoot, apply_context, apply_context_to_root
from hyper_parallel.shard.context.gather_positions import apply_gathered
from hyper_parallel.shard.dropout import (
    POSITIONS,
    apply_dropout,
    apply_functional_dropout,
    refuse_other_draws,
    sites_of,
)
from hyper_parallel.shard.experts.routing import Routing, apply_experts_plan
from hyper_parallel.shard.forward import find_positions_in_masks
from hyper_parallel.shard.loss.auxiliary_loss import Balancing, own_terms
from hyper_parallel.shard.loss.causal_lm import apply_loss
from hyper_parallel.shard.memory import (
    apply_casts,
    apply_recompute,
    compute_dtypes,
    dtype,
    frees_after_forward,
    recomputed_modules,
    separately_gathered,
)
from hyper_parallel.shard.model_structure import (
    is_own,
    is_transformers,
    names_of_parameters,
    without_values,
)
from hyper_parallel.shard.owner_check.check import check_rows, check_rows_of_call, refuse_longer
from hyper_parallel.shard.parameter_gather import (
    Access,
    AccessedParameter,
    Dtypes,
    GatheredAtRoot,
    apply_access,
)
from hyper_parallel.shard.parameter_hooks import ParameterHooks
from hyper_parallel.shard.plan import Plan, make_plan
from hyper_parallel.shard.process_mesh import PipelinePlace, ProcessMesh, placed_on
from hyper_parallel.shard.region_check import (
    check_before_training,
    check_on_first_call,
    refusal_before_training,
)
from hyper_parallel.shard.region_check.result_cache import unchanged
from hyper_parallel.shard.reshard import cut
from hyper_parallel.shard.sharded_model import ShardedModel, attach, is_sharded
from hyper_parallel.shard.tensor.apply_1d import apply_boundaries, apply_edges
from hyper_parallel.shard.tensor.apply_2d import apply_edges_2d, apply_tensor_2d, split_between
from hyper_parallel.shard.vision_and_audio_towers import apply_towers
from hyper_parallel.shard.weights_written_in_forward import (
    agree_on_collectives,
    explain_errors,
    refuse_parameters_in_attributes,
    refuse_sparse_gradients,
)
from hyper_parallel.strategy import Strategy

Lowering = Literal["fsdp", "traceable"]


@dataclass(frozen=True)
class _Task:
    """A strategy to put into effect on a model."""

    model: nn.Module
    plan: Plan
    strategy: Strategy
    axes: ProcessMesh
    dtypes: dict[str, torch.dtype]
    """Module name to compute dtype."""
    gathers: bool
    """The traceable lowering: parameters are gathered where they are used."""

    @property
    def stored(self) -> torch.dtype:
        """The dtype of parameters between steps."""
        return dtype(self.strategy.precision.param)

    @property
    def reduced(self) -> torch.dtype:
        """The dtype in which gradients are summed."""
        return dtype(self.strategy.precision.reduce)


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    *,
    lowering: Lowering = "fsdp",
    alone: bool = False,
    like: ShardedModel | None = None,
    pipeline: PipelinePlace | None = None,
) -> nn.Module:
    """Spread `model` as `strategy` declares. Returns the same object, with the same parameter names.

    The model may be on the meta device; `init_weights` or `load_weights` then fill each rank's pieces. With values,
    every rank must give the same ones. A process group of strategy.axes.world ranks must exist, unless that is 1.

    `lowering`: how the data axes are put into effect. "fsdp" uses PyTorch's FSDP2; "traceable" gathers parameters
    where they are used, which a graph can capture and simulated ranks can run. Both give the same values.

    `alone`: the strategy is that of one device, and the process group that there may be has no part in it.

    `pipeline`: this rank's place in the strategy's pipeline; what its stage does not hold goes to the meta device.

    `like`: a model that was parallelized by the same strategy in this process; its process groups serve this one too.

    Unless `strategy.check` is false, what the strategy splits is first run whole and split on random numbers: a
    Transformers causal language model here, another module in its first call with gradients.

    So is whether its rows depend on each other, where the data axes give ranks other rows.

    Raises StrategyError when the strategy does not fit the model or the process group, or computes other gradients.
    """
    _refuse_model(model, strategy, pipeline)
    strategy = strategy.of_stage
    plan = make_plan(model, strategy)
    mesh = plan.mesh
    axes = _axes(plan, strategy, alone=alone, like=like, pipeline=pipeline)
    skeleton = copy.deepcopy(model) if any(p.is_meta for p in model.parameters()) else None

    # Everything that may be refused is, before the model is touched.
    if mesh.world > 1:
        refuse_parameters_in_attributes(model)
        refuse_sparse_gradients(model)
    dtypes = compute_dtypes(model, strategy.precision)
    refuse_other_draws(model)
    frees_after_forward(strategy.memory, separately_gathered(model, plan, dtypes))
    # The stages of a pipeline are recomputed in their graphs, by the counts of their own layers.
    recomputed = recomputed_modules(model, strategy) if pipeline is None else []

    together = pipeline.alike if pipeline is not None else ()
    unseen, longest = False, None
    if like is None:
        with waiting("comparing the strategy with one device, on a small copy of the model"), unchanged():
            unseen = not check_before_training(model, strategy, plan, on_simulated_ranks, together=together)
            longest = check_rows(model, strategy, on_simulated_ranks, together)
    original = skeleton if skeleton is not None or not unseen else without_values(model)

    own, gathers = is_own(model), lowering == "traceable"
    hooks = ParameterHooks(model)
    if gathers and axes.connected:
        hooks.refuse("lowering='traceable' is for steps that are captured, which call none")
    apart = pipeline is not None and pipeline.submodels
    find_positions_in_masks(model)
    # Ranks that are simulated run one after the other, and need not agree.
    at_root = own and gathers and axes.connected and mesh.world > 1
    task = _Task(model, plan, strategy, axes, dtypes, gathers)
    routing, balancing = _apply(task, towers=not apart, at_root=at_root)
    apply_recompute(map(model.get_submodule, recomputed), strategy.memory.recompute == "selective")

    fsdp2 = axes.connected and not gathers
    _store(task, fsdp2, pipeline)
    if fsdp2:
        _fully_shard(task)
    # Every rank makes the same groups now, not when a forward pass or a metric first needs one.
    for name in mesh.names:
        _ = axes[name]
    handle = ShardedModel(model, strategy, plan, axes, skeleton, routing, balancing, pipeline)
    attach(handle)
    if fsdp.fully_sharded(model):
        fsdp.keep_gathered_fresh(model)
        if own:
            agree_on_collectives(model, axes, strategy)
    hooks.apply(handle)
    if own and mesh.world > 1:
        explain_errors(model)
    if unseen and original is not None:
        check_on_first_call(
            model,
            original,
            strategy,
            plan,
            on_simulated_ranks,
            together,
            functools.partial(check_rows_of_call, strategy, together),
        )
    if longest is not None:
        refuse_longer(model, strategy, longest)
    return model


def _axes(
    plan: Plan, strategy: Strategy, *, alone: bool, like: ShardedModel | None, pipeline: PipelinePlace | None
) -> ProcessMesh:
    """The axes of a plan with their process groups; see `parallelize`."""
    if alone and plan.mesh.world > 1:
        raise StrategyError(
            f"alone=True computes on one device, but the strategy's axes multiply to {plan.mesh.world}"
        )
    if like is None:
        stage = pipeline.devices if pipeline is not None else None
        return ProcessMesh.of(plan.mesh, placed_on(strategy), alone=alone, stage=stage)
    if like.mesh != plan.mesh:
        raise StrategyError(
            f"`like` was parallelized over {like.mesh.axes}, and this strategy's axes are {plan.mesh.axes}"
        )
    return like.axes


def _refuse_model(model: nn.Module, strategy: Strategy, pipeline: PipelinePlace | None) -> None:
    """Raise StrategyError for a model that cannot be parallelized now, or not by this call."""
    if is_sharded(model):
        raise StrategyError(f"this {type(model).__name__} is parallelized already")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise StrategyError(
                f"{name!r} of {type(model.get_submodule(name.rpartition('.')[0])).__name__} has no shape before its "
                "first call; call the model once on a sample, and then hp.parallelize"
            )
    if strategy.submodels:
        raise StrategyError(
            "strategy.submodels: hp.parallelize spreads a model as a whole; 'train' takes such a run file, and "
            "hp.submodels such parts in a loop of your own (docs/submodels.md)"
        )
    if any(is_per_rank(p) for p in model.parameters()):
        raise StrategyError(
            "where ranks are simulated, build the model under compat.local_tensor.one_device()"
        )
    if strategy.axes.pipeline > 1 and pipeline is None:
        raise StrategyError(
            "axes.pipeline: hp.parallelize spreads a model over one device group; call hp.pipeline(model, strategy, "
            "rows=…, length=…, micro_batches=…), whose forward_backward takes the place of loss.backward(), or leave "
            "the axis out"
        )


def _apply(task: _Task, *, towers: bool, at_root: bool) -> tuple[Routing | None, Balancing | None]:
    """Wrap what the plan names: regions, attention, random numbers, the loss, accesses to parameters, casts. `towers`:
    those that did not run get gradients of zero. `at_root`: all parameters are accessed when the model is called.

    Returns the counts of tokens by expert, and the routers' auxiliary loss, where there are such.
    """
    model, plan, axes = task.model, task.plan, task.axes
    mesh, terms = plan.mesh, own_terms(model)
    balancing = Balancing.of(model, plan, terms.balancing)
    routing = apply_experts_plan(model, plan, axes)
    stretches = apply_boundaries(model, plan, axes[mesh.tensor])
    stretches |= apply_tensor_2d(model, plan, axes)
    between = functools.partial(split_between, plan, axes)
    if plan.context is not None and plan.context.method == "gathered":
        context: ContextRoot | None = apply_gathered(
            model, plan.context, axes, lambda name: between(name)[POSITIONS].size if between(name) else 1
        )
    else:
        context = apply_context(model, plan.context, axes)
    apply_edges(model, plan, axes[mesh.tensor])
    apply_edges_2d(model, plan, axes)
    positions = context.positions_at if context is not None else lambda _: None
    site = sites_of(axes[mesh.tensor], stretches, between, positions)
    apply_dropout(model, site)
    apply_functional_dropout(model, site)
    apply_loss(model, plan, axes, task.dtypes, context.cut if context is not None else None, terms)
    apply_context_to_root(model, context)
    if towers:
        apply_towers(model)
    _apply_accesses(task, at_root)
    apply_casts(model, task.dtypes)
    return routing, balancing


def check_tokens(model: nn.Module, strategy: Strategy, vocabulary: int) -> None:
    """Check a strategy on a model of `vocabulary` token ids as `parallelize` does, before it is parallelized; a module
    that is not Transformers' is otherwise checked in its first call. A collective.

    Raises StrategyError when the strategy computes other gradients than one device.
    """
    check_before_training(model, strategy, make_plan(model, strategy), on_simulated_ranks, vocabulary)


def refusal_of_tokens(model: nn.Module, strategy: Strategy, vocabulary: int) -> str | None:
    """Why `check_tokens` refuses a strategy; None where it does not. No collective."""
    plan = make_plan(model, strategy)
    return refusal_before_training(model, strategy, plan, on_simulated_ranks, vocabulary)


def on_simulated_ranks(model: nn.Module, strategy: Strategy) -> nn.Module:
    """How a check spreads its copies; a strategy of one rank has no part in the process group that there may be."""
    return parallelize(model, strategy, lowering="traceable", alone=strategy.axes.world == 1)


def _apply_accesses(task: _Task, at_root: bool) -> None:
    model, plan, dtypes = task.model, task.plan, task.dtypes
    known = names_of_parameters(model)
    alone = plan.mesh.world == 1
    stored_whole = plan.mesh.size("replicate") * plan.mesh.size(plan.mesh.storage) == 1
    by_group: dict[str, list[AccessedParameter]] = {}
    for name, module in model.named_modules():
        # A module with another compute dtype than the model is gathered separately, as are experts.
        separate = dtypes[name] != dtypes[""] or name in plan.experts
        groups = {name if separate else _group_of(name, plan)}
        if not is_transformers(model):
            # A module of the user's may be called by itself, and use the weights of any other.
            groups |= {name, ""} if stored_whole and not separate else {name}
        for own, parameter in module._parameters.items():
            if parameter is not None and not (alone and parameter.dtype == dtypes[name]):
                planned = plan.parameters[known[id(parameter)]]
                access = Access(planned, task.axes, Dtypes(dtypes[name], task.reduced), task.gathers)
                for group in groups:
                    by_group.setdefault(group, []).append(AccessedParameter(module, own, access))
    if at_root:
        each = {(id(one.owner), one.own): one for accesses in by_group.values() for one in accesses}
        GatheredAtRoot(model, [*each.values()], task.axes)
        return
    for name, accesses in by_group.items():
        apply_access(model.get_submodule(name), accesses)


def _group_of(name: str, plan: Plan) -> str:
    """The module whose forward gathers a module's parameters: its layer; outside of layers the root."""
    if plan.layers is None or not name.startswith(f"{plan.layers}."):
        return ""
    index = name[len(plan.layers) + 1 :].partition(".")[0]
    return f"{plan.layers}.{index}"


def _store(task: _Task, fsdp2: bool, pipeline: PipelinePlace | None) -> None:
    """Exchange every parameter for this rank's piece of it.

    With FSDP2 the storage axes are left to it. Where there is one tensor axis its piece is carried by a DTensor, so
    that it tells what it is to everything that reads parameters, torch's own clipping for one.
    """
    plan, axes, stored = task.plan, task.axes, task.stored
    names = names_of_parameters(task.model)

    def make(old: nn.Parameter) -> nn.Parameter:
        name = names[id(old)]
        if pipeline is not None and not pipeline.owns(name):
            return nn.Parameter(torch.empty_like(old, device="meta", dtype=stored), old.requires_grad)
        parameter = plan.parameters[name]
        layout = parameter.computed if fsdp2 else parameter.layout
        if plan.mesh.world == 1:
            return old if old.dtype == stored else nn.Parameter(old.detach().to(stored), old.requires_grad)
        local = per_rank(lambda rank: cut(old.detach().to(stored), layout, axes.devices.coordinate(rank)))
        if fsdp2 and axes.carries_tensor and set(layout.split_axes) <= {"tensor_x"}:
            local = _as_dtensor(local, layout, axes.whole["tensor_x"])
        stored_parameter = nn.Parameter(local, old.requires_grad)
        if isinstance(local, DTensor):
            keep_gradient_sharded(stored_parameter)
        return stored_parameter

    fsdp.replace_parameters(task.model, make)


def _as_dtensor(local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    dims = [dim for dim, split in enumerate(layout.dims) if split]
    placement = Shard(dims[0]) if dims else Replicate()
    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(layout.shape), stride=stride
    )


def _fully_shard(task: _Task) -> None:
    """FSDP2 over the data axes: a group for each layer, one for the rest, so that tied weights stay together.

    A module whose weights are stored over other axes, or that has another compute dtype, forms its own group.
    """
    model, plan, dtypes = task.model, task.plan, task.dtypes
    mesh = plan.mesh

    def shard(module: nn.Module, storage: str, compute: torch.dtype, reshard: bool) -> None:
        if mesh.size(storage) * mesh.size("replicate") == 1:
            return
        # FSDP2 exchanges the parameters of what it has taken, so they are looked up anew.
        plans = {id(p): plan.parameters[name] for name, p in model.named_parameters()}
        axes = ("replicate", storage) if mesh.size("replicate") > 1 else (storage,)
        levels = task.axes[storage].levels
        fsdp.shard_module(
            module,
            task.axes.device_mesh(*axes),
            compute=compute if compute != task.stored else None,
            reduce=task.reduced if task.reduced != compute else None,
            reshard_after_forward=reshard,
            # Of no elements there are no shards.
            ignored=[p for p in module.parameters() if plans[id(p)].storage != storage or not p.numel()],
            dims={p: plans[id(p)].storage_dim or 0 for p in module.parameters()},
            gather=levels.all_gather if levels else None,
            scatter=levels.reduce_scatter if levels else None,
        )

    apart = separately_gathered(model, plan, dtypes)
    frees = frees_after_forward(task.strategy.memory, apart)
    for name, storage in apart.items():
        shard(model.get_submodule(name), storage, dtypes[name], frees[name])
    shard(model, mesh.storage, dtypes[""], False)
