"""A Layout as the placements of a DTensor, and back.

A DTensor has one placement for each axis of its mesh: `Shard(dim)`, `Replicate()` or `Partial()`. Where several axes
split one dim they do so in the order of the mesh. What a Layout can say and placements cannot:

| Layout | Why not |
|---|---|
| `[8/tensor_x/shard]` where shard is the outer axis of the mesh | axes split in the order of the mesh |
| `[6/shard*context]`, when shard and context do not divide it | a joint cuts once, axes one after the other cut again |
| `[8/expert]`, where the fold is no product of whole axes | it has no mesh dim |
| `[(4+2+2)/tensor_x]` | a dim is split as a whole, not part by part |
| `[4@2.0.1.3/shard]` | a dim is split in the order of its indices |
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import Mesh


def layout_to_placements(layout: Layout) -> tuple[Placement, ...]:
    """One placement for each axis of `layout.mesh`, in its order, on a device mesh of the same shape.

    Raises StrategyError when placements cannot say what the layout does.
    """
    mesh = layout.mesh
    if layout.parts:
        raise _inexpressible(layout, "a fused dim is split part by part")
    if layout.order:
        raise _inexpressible(layout, "a dim is split in another order than that of its indices")
    by_axis: dict[str, Placement] = {}
    for dim, names in enumerate(layout.dims):
        axes = [axis for name in names for axis in _whole_axes(layout, name)]
        if sorted(axes, key=mesh.names.index) != axes:
            raise _inexpressible(
                layout, f"dim {dim} is split by {' before '.join(axes)}, against the mesh's order"
            )
        by_axis |= dict.fromkeys(axes, Shard(dim))
        # A joint cuts once where its axes cut one after the other, which differs where a length is not divided.
        nested = Layout(mesh, (layout.shape[dim],), (tuple(axes),))
        own = Layout(mesh, (layout.shape[dim],), (names,))
        for indices in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
            coordinate = dict(zip(axes, indices, strict=True))
            if nested.intervals(0, coordinate) != own.intervals(0, coordinate):
                raise _inexpressible(
                    layout, f"{'/'.join(axes)} cut a length of {layout.shape[dim]} elsewhere"
                )
    for name in sorted(layout.partial):
        by_axis |= {axis: Partial() for axis in _whole_axes(layout, name)}
    return tuple(by_axis.get(axis, Replicate()) for axis in mesh.names)


def placements_to_layout(placements: Sequence[Placement], mesh: Mesh, shape: Sequence[int]) -> Layout:
    """The Layout of a DTensor of `shape`, on a device mesh of the axes of `mesh` in their order.

    Raises StrategyError for placements other than Shard, Replicate and a partial sum.
    """
    dims: list[tuple[str, ...]] = [()] * len(shape)
    partial = set()
    for axis, placement in zip(mesh.names, placements, strict=True):
        if type(placement) is Shard:
            dim = placement.dim % len(shape)
            dims[dim] = (*dims[dim], axis)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            partial.add(axis)
        elif type(placement) is not Replicate:
            raise StrategyError(
                f"the placement {placement} over {axis} is no Layout; "
                "redistribute to Shard, Replicate or Partial() first"
            )
    return Layout(mesh, tuple(shape), tuple(dims), partial=frozenset(partial))


def _whole_axes(layout: Layout, name: str) -> list[str]:
    """The axes, outer to inner and of degree above 1, that an axis, joint or fold is the product of."""
    mesh = layout.mesh
    if "*" in name:
        return [axis for part in name.split("*") for axis in _whole_axes(layout, part)]
    fold = dict(mesh.folds).get(name)
    if fold is None:
        return [name] if mesh.size(name) > 1 else []
    axes: list[str] = []
    stride = 1
    for axis in reversed(fold.over):
        size = mesh.size(axis)
        if fold.stride <= stride and stride * size <= fold.stride * fold.size and size > 1:
            axes.insert(0, axis)
        elif stride * size > fold.stride and stride < fold.stride * fold.size and size > 1:
            raise _inexpressible(layout, f"{name} is a part of {axis}")
        stride *= size
    return axes


def _inexpressible(layout: Layout, why: str) -> StrategyError:
    return StrategyError(
        f"{layout} has no DTensor placements: {why}; move it with hyper_parallel.shard.reshard instead"
    )
