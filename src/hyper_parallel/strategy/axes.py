"""The axes of the device mesh and their degrees.

World = pipeline · replicate · shard · context · tensor_y · tensor_x. The order in which a file names them is outer to
inner: the last one lies on neighbouring ranks, but for `pipeline`, which written last is the outermost. Axes that are
not named have degree 1. `expert` adds no ranks: it folds over shard, context and tensor, whose product it divides.
`pipeline` is no axis of a mesh: each of its ranks is a device group with a mesh of the other axes.

A degree may be `auto`: the planner chooses it for the available workers. Until then it counts as 1, and `open` contains
the axis.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_serializer, model_validator

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
