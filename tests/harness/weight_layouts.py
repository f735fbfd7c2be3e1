"""Random descriptions of parameters on random meshes, and which elements of a parameter each rank holds."""

from __future__ import annotations

import random

import numpy as np

from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.rl.weights.description import Description, Parameter


def random_mesh(draw: random.Random, most: int = 6) -> Mesh:
    """One to three axes, of at most `most` ranks together."""
    while True:
        mesh = Mesh(*((name, draw.randint(1, 3)) for name in ("replicate", "shard", "tensor")))
        if mesh.world <= most:
            return mesh


def random_layout(draw: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """Each axis splits a dim or holds copies; some dims have fused parts, and short ones an order."""
    layout = Layout.replicated(mesh, shape)
    if not shape:
        return layout
    if shape[0] <= 16 and draw.random() < 0.3:
        order = list(range(shape[0]))
        draw.shuffle(order)
        layout = layout.ordered(0, tuple(order))
    for axis in draw.sample(mesh.names, len(mesh.names)):
        dim = draw.randrange(-1, len(shape))
        if dim < 0:
            continue
        parts = None
        if not layout.dims[dim] and dim not in layout.order and shape[dim] > 2 and draw.random() < 0.3:
            first = draw.randint(1, shape[dim] - 1)
            parts = (first, shape[dim] - first)
        layout = layout.split(dim, axis, parts)
    return layout


def random_description(
    draw: random.Random, role: str, shapes: dict[str, tuple[int, ...]], dtypes: list[str], most: int = 6
) -> Description:
    """The parameters of `shapes` on one mesh, each in a layout and a dtype of its own."""
    mesh = random_mesh(draw, most)
    return description_on(draw, role, mesh, shapes, dtypes)


def description_on(
    draw: random.Random, role: str, mesh: Mesh, shapes: dict[str, tuple[int, ...]], dtypes: list[str]
) -> Description:
    """As `random_description`, on a given mesh."""
    ranks = (tuple(range(mesh.world)),)
    return Description(
        role=role,
        world=mesh.world,
        parameters=tuple(
            Parameter(
                name=name, layout=random_layout(draw, mesh, shape), dtype=draw.choice(dtypes), groups=ranks
            )
            for name, shape in shapes.items()
        ),
    )


def held(parameter: Parameter, rank: int) -> np.ndarray:
    """The global index of each element of a rank's local tensor, found index by index."""
    layout = parameter.layout
    whole = np.arange(int(np.prod(layout.shape)), dtype=np.int64).reshape(layout.shape)
    here = layout.mesh.coordinate(rank)
    for dim in range(len(layout.shape)):
        indices = [i for start, stop in layout.intervals(dim, here) for i in range(start, stop)]
        whole = whole.take(indices, axis=dim)
    return whole
