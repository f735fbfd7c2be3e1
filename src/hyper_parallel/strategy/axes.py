"""Axes of the device mesh and their degrees, their link levels (`placement`), and parts with axes of their own.

World = pipeline · replicate · shard · context · tensor_y · tensor_x. The order in which a file names them is outer to
inner: the last one lies on neighbouring ranks, but for `pipeline`, which written last is the outermost. Axes that are
not named have degree 1. `expert` adds no ranks: it folds over shard, context and tensor, whose product it divides.
`pipeline` is no axis of a mesh: each of its ranks is a device group with a mesh of the other axes.

A degree may be `auto`: the planner chooses it for the available workers. Until then it counts as 1, and `open` contains
the axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from hyper_parallel.errors import StrategyError, nearest
from hyper_parallel.strategy.section import Section

AUTO = "auto"
"""The value of a degree that the planner chooses."""

Degree = Annotated[
    int, Field(ge=1, strict=True, json_schema_extra={"type": ["integer", "string"], "examples": [AUTO]})
]

AXIS_NAMES = ("replicate", "shard", "context", "tensor_y", "tensor_x")
"""The axes of a mesh, whose degrees multiply to the number of its ranks, in their canonical order."""

OPEN_NAMES = ("pipeline", *AXIS_NAMES, "expert")
"""The axes whose degree may be `auto`."""

EXPERT_SPANS = ("shard", "context", "tensor_y", "tensor_x")
"""The axes that `expert` folds over."""


class Axes(Section):
    """Degrees of the mesh axes; their product is the number of workers."""

    pipeline: Degree = 1
    """Device groups that compute one after the other, each a part of the layers (pipeline parallelism); section
    `pipeline` says how.
    """
    replicate: Degree = 1
    """Copies of the parameters; each copy sees different data (data parallelism)."""
    shard: Degree = 1
    """Ranks that share one copy of parameters, gradients and optimizer state, and see different data (fully sharded
    data parallelism). With `replicate` above 1 this is hybrid sharding (HSDP).
    """
    context: Degree = 1
    """Ranks that split each sequence's positions (context parallelism), and share parameters as `shard` does."""
    tensor_x: Degree = Field(default=1, validation_alias=AliasChoices("tensor_x", "tensor"))
    """Ranks that split each layer's matrices and see the same data (tensor parallelism). Also named `tensor`."""
    tensor_y: Degree = 1
    """The second axis of 2D tensor parallelism: matrices and activations are split over tensor_x · tensor_y."""
    expert: Degree = 1
    """Ranks over which the experts of a mixture-of-experts layer are split. Not multiplied into the number of workers:
    it folds over shard · context · tensor_y · tensor_x and divides their product.
    """
    order: tuple[str, ...] = Field(default=AXIS_NAMES, exclude=True, json_schema_extra={"readOnly": True})
    """The axes outer to inner, derived from the order of the keys; do not set it."""
    outside: int = Field(default=0, exclude=True, json_schema_extra={"readOnly": True})
    """How many axes of `order` lie outside of the pipeline, derived from the order of the keys; do not set it."""
    open: tuple[str, ...] = Field(default=(), exclude=True, json_schema_extra={"readOnly": True})
    """The axes whose degree is `auto`, `pipeline` and `expert` included; do not set it."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if given == AUTO:
            given = dict.fromkeys(OPEN_NAMES, AUTO)
        if not isinstance(given, dict):
            return given
        if {"tensor", "tensor_x"} <= given.keys():
            raise ValueError("tensor and tensor_x are the same axis; write one of them")
        if "order" not in given:
            written = ["tensor_x" if axis == "tensor" else axis for axis in given]
            named = [axis for axis in written if axis in AXIS_NAMES]
            unnamed = [axis for axis in AXIS_NAMES if axis not in named]
            given = {**given, "order": (*unnamed, *named)}
            if "pipeline" in written and "outside" not in given:
                before = [axis for axis in written[: written.index("pipeline")] if axis in named]
                # Written last, as an override on the command line is, it says nothing: stages are neighbours rarely.
                given["outside"] = 0 if len(before) == len(named) else len(unnamed) + len(before)
        if AUTO in given.values():
            left = [axis for axis, degree in given.items() if degree == AUTO]
            given = {axis: degree for axis, degree in given.items() if degree != AUTO}
            given["open"] = tuple("tensor_x" if axis == "tensor" else axis for axis in left)
        return given

    @model_validator(mode="after")
    def _check(self) -> Axes:
        strangers = sorted(set(self.open) - {*OPEN_NAMES})
        if strangers:
            raise ValueError(f"'auto' is for axes; {strangers[0]!r} is none")
        if sorted(self.order) != sorted(AXIS_NAMES):
            raise ValueError(
                f"order must name each of {', '.join(AXIS_NAMES)} once; got {', '.join(self.order)}"
            )
        spanned = math.prod(self.degree(axis) for axis in EXPERT_SPANS)
        if spanned % self.expert and not self.open:
            raise ValueError(
                f"expert is {self.expert}, which does not divide shard · context · tensor = {spanned}; "
                "experts are spread over the ranks of these axes"
            )
        return self

    @model_serializer
    def _write_in_order(self) -> dict[str, int | Literal["auto"]]:
        names = [*self.order, "expert"]
        if self.pipeline > 1 or "pipeline" in self.open:
            names.insert(self.outside, "pipeline")
        return {axis: "auto" if axis in self.open else self.degree(axis) for axis in names}

    @property
    def world(self) -> int:
        """The number of ranks: the product of all degrees, where open ones count as 1."""
        return self.pipeline * math.prod(self.degree(axis) for axis in AXIS_NAMES)

    @property
    def product(self) -> str:
        """The degrees above 1, outer to inner: ``pipeline 2 · shard 4``."""
        names = list(self.order)
        names.insert(self.outside, "pipeline")
        return " · ".join(f"{axis} {self.degree(axis)}" for axis in names if self.degree(axis) > 1)

    @property
    def data(self) -> int:
        """The number of ranks that see different rows: replicate · shard."""
        return self.replicate * self.shard

    @property
    def tensor(self) -> int:
        """The number of ranks that split each matrix: tensor_x · tensor_y."""
        return self.tensor_x * self.tensor_y

    def degree(self, axis: str) -> int:
        """The degree of one axis by name."""
        return int(getattr(self, axis))


# `placement` section: link level of each axis, and devices per level.
#
# Levels from the inside out: a `node`'s devices share the fastest links, a `supernode` joins nodes by links nearly as
# fast, the `network` joins the supernodes. The axes of an inner level are the inner ones in rank order, so neighbouring
# ranks are those with the fastest links.

LEVELS = ("node", "supernode", "network")
"""The link levels, innermost first."""

Count = Annotated[int, Field(ge=1, strict=True)]


class Devices(Section):
    """Devices per link level, if not the product of the axes placed on it."""

    node: Count | None = None
    """Devices in a node. Default: the launcher's number, else the product of the axes on `node`."""
    supernode: Count | None = None
    """Devices in a supernode, a multiple of those in a node. Default: the product of the axes on `node` and
    `supernode`.
    """

    @model_validator(mode="after")
    def _whole_nodes(self) -> Devices:
        if self.node and self.supernode and self.supernode % self.node:
            raise ValueError(
                f"a supernode of {self.supernode} devices is not made of whole nodes of {self.node}; "
                "give a multiple"
            )
        return self


class Placement(Section):
    """The link level of each axis. The order within a level is that of `axes`.

    >>> Placement(node=("tensor",), network=("replicate", "shard")).order(Axes(tensor=8, shard=2, replicate=4))
    ('context', 'tensor_y', 'shard', 'replicate', 'tensor_x')
    """

    node: tuple[str, ...] = ()
    """Axes whose ranks are neighbours within a node."""
    supernode: tuple[str, ...] = ()
    """Axes across the nodes of a supernode."""
    network: tuple[str, ...] = ()
    """Axes across supernodes, or across nodes where there is no supernode."""
    devices: Devices = Devices()
    """Devices per level. An axis that is larger than its level spans levels."""
    collectives: Literal["levels", "flat"] = "levels"
    """Algorithm of collectives over an axis that spans levels: `levels` runs them level by level, so that little
    crosses the slow level; `flat` makes one call and leaves the levels to the collective library.
    """

    @field_validator(*LEVELS, mode="before")
    @classmethod
    def _read_axes(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        names = tuple("tensor_x" if name == "tensor" else name for name in given)
        for name in names:
            if name in ("expert", "expert_shard"):
                raise ValueError(
                    "expert is not placed: it folds over shard, context and tensor and lies where they do"
                )
            if name == "pipeline":
                raise ValueError(
                    "pipeline is not placed: its stages lie outside of the placed axes, on the outermost level"
                )
            if name not in AXIS_NAMES:
                hint = nearest(str(name), AXIS_NAMES)
                raise ValueError(
                    f"no axis is named {name!r}{hint or '; the axes are ' + ', '.join(AXIS_NAMES)}"
                )
        return names

    @model_validator(mode="after")
    def _once_each(self) -> Placement:
        for axis in self.placed:
            levels = [level for level in LEVELS for name in getattr(self, level) if name == axis]
            if len(levels) > 1:
                raise ValueError(f"axis {axis} is placed twice, on {' and '.join(levels)}; keep one")
        return self

    @property
    def placed(self) -> tuple[str, ...]:
        """The axes that some level names, innermost level first."""
        return (*self.node, *self.supernode, *self.network)

    @property
    def given(self) -> bool:
        """Whether the file says anything about levels."""
        return bool(self.placed or self.devices.node or self.devices.supernode)

    def order(self, axes: Axes) -> tuple[str, ...]:
        """The axes outer to inner: by level, and within a level as `axes` orders them.

        The order of `axes` itself if no axis is placed. Raises ValueError if some axes of degree above 1 are placed and
        others are not.
        """
        if not self.placed:
            return axes.order
        missing = [axis for axis in axes.order if axes.degree(axis) > 1 and axis not in self.placed]
        if missing:
            raise ValueError(
                f"placement leaves out {', '.join(missing)}; name every axis of degree above 1 on one of "
                f"{', '.join(LEVELS)}"
            )
        level = {axis: depth for depth, name in enumerate(LEVELS) for axis in getattr(self, name)}
        return tuple(sorted(axes.order, key=lambda axis: -level.get(axis, len(LEVELS))))

    def joined(self, axes: Axes, level: str) -> int:
        """The product of the degrees of the axes placed on `level` and on the levels inside it."""
        inside = LEVELS[: LEVELS.index(level) + 1]
        return math.prod(axes.degree(axis) for name in inside for axis in getattr(self, name))


class Submodel(Section):
    """A part of a model, and the devices that compute it.

    >>> Submodel(modules=["model.vision_tower"], devices=2).axes.replicate
    2
    """

    modules: tuple[str, ...] = ()
    """Names of modules, each with all that it contains. One submodel may leave them out: it has all others."""
    axes: Axes = Axes()
    """The degrees of the mesh axes of its devices. `pipeline` is for the submodel with the decoder's layers."""
    devices: Annotated[int, Field(ge=1)] | None = None
    """Number of devices: the product of the axes. Without axes they are copies for different rows (`replicate`)."""

    @model_validator(mode="before")
    @classmethod
    def _copies(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("devices") and not given.get("axes"):
            return {**given, "axes": {"replicate": given["devices"]}}
        return given

    @model_validator(mode="after")
    def _filled(self) -> Submodel:
        if self.devices is not None and self.devices != self.axes.world:
            raise ValueError(
                f"devices is {self.devices}, and the axes multiply to {self.axes.world} "
                f"({self.axes.product or 'none is set'}); make them equal, or leave devices out"
            )
        if self.axes.open:
            raise ValueError("axes of a submodel cannot be 'auto'; write their degrees")
        return self


_SUBMODELS = TypeAdapter(dict[str, Submodel])


def read_submodels(given: Mapping[str, Submodel | Mapping[str, Any]]) -> dict[str, Submodel]:
    """Submodels by name, from sections or what they are read from. Raises StrategyError."""
    try:
        found = _SUBMODELS.validate_python(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("submodels", *first["loc"])))
        raise StrategyError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
    if len(found) < 2:
        raise StrategyError(
            f"submodels: {len(found)} of them; name at least two, or use hp.parallelize for a model as a whole"
        )
    return found
