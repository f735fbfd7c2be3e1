"""`parallelize`: the declared strategy put into effect on a model, which stays the same object."""

from __future__ import annotations

import copy
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hyper_parallel.compat import collectives, fsdp
from hyper_parallel.compat.local_tensor import is_per_rank, per_rank
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.access import Access, Accesses, Dtypes, apply_access
from hyper_parallel.shard.axis import Axis
from hyper_parallel.shard.boundary import apply_boundaries
from hyper_parallel.shard.dropout import apply_dropout, refuse_other_draws
from hyper_parallel.shard.handle import ShardedModel, attach, cut
from hyper_parallel.shard.plan import Plan, make_plan
from hyper_parallel.shard.precision import apply_casts, compute_dtypes, dtype
from hyper_parallel.shard.recompute import apply_recompute
from hyper_parallel.shard.structure import layers_or_refuse
from hyper_parallel.strategy import AXIS_NAMES, Strategy

Lowering = Literal["fsdp", "traceable"]


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    device_mesh: DeviceMesh | None = None,
    *,
    lowering: Lowering = "fsdp",
    alone: bool = False,
) -> nn.Module:
    """Spread `model` as `strategy` declares. Returns the same object, with the same parameter names.

    The model may be on the meta device; `init_weights` or `load_weights` then fill each rank's pieces. With values,
    every rank must give the same ones. `device_mesh` is made from the strategy when it is left out; a process group
    of strategy.axes.world ranks must exist, unless that is 1.

    `lowering`: how the data axes are put into effect. "fsdp" uses PyTorch's FSDP2; "traceable" gathers parameters
    where they are used, which a graph can capture and simulated ranks can run. Both give the same values.

    `alone`: the strategy is that of one device, and the process group that there may be has no part in it.

    Raises StrategyError when the strategy does not fit the model or the process group.
    """
    if hasattr(model, "_hyper_parallel"):
        raise StrategyError(f"this {type(model).__name__} is parallelized already")
    assert not any(is_per_rank(p) for p in model.parameters()), (
        "build the model under one_device() when ranks are simulated"
    )
    plan = make_plan(model, strategy)
    mesh = plan.mesh
    if alone and mesh.world > 1:
        raise StrategyError(
            f"alone=True computes on one device, but the strategy's axes multiply to {mesh.world}"
        )
    if device_mesh is None and not alone:
        device_mesh = make_device_mesh(mesh)
    axes = {name: Axis.of(name, mesh, device_mesh) for name in AXIS_NAMES}
    skeleton = copy.deepcopy(model) if any(p.is_meta for p in model.parameters()) else None

    # Everything that may be refused is, before the model is touched.
    dtypes = compute_dtypes(model, strategy.precision)
    refuse_other_draws(model)
    recomputed = (
        layers_or_refuse(model, "memory.recompute: layer")[1]
        if strategy.memory.recompute == "layer"
        else None
    )

    stretches = apply_boundaries(model, plan, axes["tensor"])
    apply_dropout(model, axes["tensor"], stretches, plan.layers, plan.sequence)
    gathers = lowering == "traceable"
    _apply_accesses(model, plan, axes, dtypes, dtype(strategy.precision.reduce), gathers)
    apply_casts(model, dtypes)
    if recomputed is not None:
        apply_recompute(recomputed)

    _store(model, plan, device_mesh, dtype(strategy.precision.param), whole_over_shard=not gathers)
    if not gathers and mesh.size("shard") * mesh.size("replicate") > 1:
        assert device_mesh is not None
        _fully_shard(model, plan, strategy, device_mesh, dtypes)
    attach(ShardedModel(model, strategy, plan, device_mesh, axes, skeleton))
    return model


def make_device_mesh(mesh: Mesh, device_type: str | None = None) -> DeviceMesh | None:
    """The device mesh whose dims are `AXIS_NAMES`, with ranks placed in the order that the file declares.

    None when the mesh has one rank and there is no process group.
    """
    if not dist.is_initialized():
        if mesh.world > 1:
            raise StrategyError(
                f"the strategy's axes multiply to {mesh.world}, but this process is alone; "
                "start it with hyper-parallel or torchrun, and call torch.distributed.init_process_group"
            )
        return None
    if dist.get_world_size() != mesh.world:
        degrees = " · ".join(f"{axis} {size}" for axis, size in mesh.axes)
        raise StrategyError(
            f"the strategy's axes multiply to {mesh.world} ({degrees}), but there are {dist.get_world_size()} workers"
        )
    ranks = torch.arange(mesh.world).reshape([size for _, size in mesh.axes])
    ranks = ranks.permute([mesh.names.index(axis) for axis in AXIS_NAMES])
    return DeviceMesh(device_type or collectives.device_type(), ranks, mesh_dim_names=AXIS_NAMES)


def _apply_accesses(
    model: nn.Module,
    plan: Plan,
    axes: dict[str, Axis],
    dtypes: dict[str, torch.dtype],
    reduce: torch.dtype,
    gathers: bool,
) -> None:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    alone = plan.mesh.world == 1
    by_group: dict[str, Accesses] = {}
    for name, module in model.named_modules():
        group = _group_of(name, plan, dtypes)
        for own, parameter in module._parameters.items():
            if parameter is not None and not (alone and parameter.dtype == dtypes[name]):
                dtype_pair = Dtypes(dtypes[name], reduce)
                access = Access(plan.parameters[known[id(parameter)]], axes, dtype_pair, gathers)
                by_group.setdefault(group, []).append((module, own, access))
    for name, accesses in by_group.items():
        apply_access(model.get_submodule(name), accesses)


def _group_of(name: str, plan: Plan, dtypes: dict[str, torch.dtype]) -> str:
    """The module whose forward a module's parameters are made ready for: its layer, or itself outside of layers.

    One that computes in a dtype of its own is gathered by itself, so it is its own group too.
    """
    if plan.layers is None or not name.startswith(f"{plan.layers}.") or dtypes[name] != dtypes[""]:
        return name
    index = name[len(plan.layers) + 1 :].partition(".")[0]
    return f"{plan.layers}.{index}"


def _store(
    model: nn.Module, plan: Plan, device_mesh: DeviceMesh | None, stored: torch.dtype, whole_over_shard: bool
) -> None:
    """Exchange every parameter for this rank's piece of it.

    With FSDP2 the shard axis is left to it: a piece is then that of the tensor axis, carried by a DTensor so that
    it tells what it is to everything that reads parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def make(old: nn.Parameter) -> nn.Parameter:
        layout = plan.parameters[names[id(old)]].layout
        if whole_over_shard and "shard" in layout.split_axes:
            layout = layout.without("shard")
        if plan.mesh.world == 1:
            return old if old.dtype == stored else nn.Parameter(old.detach().to(stored), old.requires_grad)
        local = per_rank(lambda rank: cut(old.detach().to(stored), layout, rank))
        if whole_over_shard and plan.mesh.size("tensor") > 1:
            assert device_mesh is not None
            local = _as_dtensor(local, layout, device_mesh["tensor"])
        return nn.Parameter(local, old.requires_grad)

    fsdp.replace_parameters(model, make)


def _as_dtensor(local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    dims = [dim for dim, split in enumerate(layout.dims) if "tensor" in split]
    placement = Shard(dims[0]) if dims else Replicate()
    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(layout.shape), stride=stride
    )


def _fully_shard(
    model: nn.Module, plan: Plan, strategy: Strategy, device_mesh: DeviceMesh, dtypes: dict[str, torch.dtype]
) -> None:
    """FSDP2 over the data axes: a group for each layer, one for the rest, so that tied weights stay together."""
    mesh = device_mesh["replicate", "shard"] if plan.mesh.size("replicate") > 1 else device_mesh["shard"]
    stored, reduce = dtype(strategy.precision.param), dtype(strategy.precision.reduce)

    def shard(module: nn.Module, compute: torch.dtype, reshard: bool) -> None:
        fsdp.shard_module(
            module,
            mesh,
            compute=compute if compute != stored else None,
            reduce=reduce if reduce != compute else None,
            reshard_after_forward=reshard,
        )

    reshard = strategy.memory.reshard_after_forward
    for name, module in model.named_modules():
        owns = any(parameter is not None for parameter in module._parameters.values())
        if name and owns and dtypes[name] != dtypes[""]:
            shard(module, dtypes[name], reshard)
    if plan.layers is not None:
        for layer in model.get_submodule(plan.layers).children():
            shard(layer, dtypes[""], reshard)
    shard(model, dtypes[""], False)
