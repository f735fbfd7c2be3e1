"""The axes of the device mesh and their degrees.

World = replicate · shard · tensor. The order in which a file names them is outer to inner: the last one
lies on neighbouring ranks. Axes that are not named have degree 1.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_serializer, model_validator

from hyper_parallel.strategy.section import Section

Degree = Annotated[int, Field(ge=1, strict=True)]

AXIS_NAMES = ("replicate", "shard", "tensor")
"""The axes that are built, in the canonical order of the device mesh."""


class Axes(Section):
    """Degrees of the mesh axes; their product is the number of workers."""

    reserved: ClassVar = {
        "context": "context parallelism comes with HyperShard's full set of axes",
        "tensor_x": "2D tensor parallelism comes with HyperShard's full set of axes; write 'tensor' for 1D",
        "tensor_y": "2D tensor parallelism comes with HyperShard's full set of axes; write 'tensor' for 1D",
        "expert": "expert parallelism comes with HyperShard's full set of axes",
        "pipeline": "pipeline parallelism comes with HyperMPMD",
    }

    replicate: Degree = 1
    """Copies of the parameters; each copy sees other data (data parallelism)."""
    shard: Degree = 1
    """Ranks that share one copy of parameters, gradients and optimizer state, and see other data
    (fully sharded data parallelism). With `replicate` above 1 this is hybrid sharding (HSDP)."""
    tensor: Degree = 1
    """Ranks that split each layer's matrices and see the same data (tensor parallelism)."""
    order: tuple[str, ...] = Field(default=AXIS_NAMES, exclude=True, json_schema_extra={"readOnly": True})
    """The axes outer to inner, read off the order of the keys; not written by hand."""

    @field_validator("replicate", "shard", "tensor", mode="before")
    @classmethod
    def _no_auto(cls, degree: Any) -> Any:
        if degree == "auto":
            raise ValueError("'auto' needs the planner, which is not built yet; write a number")
        return degree

    @model_validator(mode="before")
    @classmethod
    def _read_order(cls, given: Any) -> Any:
        if isinstance(given, dict) and "order" not in given:
            named = [axis for axis in given if axis in AXIS_NAMES]
            given = {**given, "order": (*(axis for axis in AXIS_NAMES if axis not in named), *named)}
        return given

    @model_validator(mode="after")
    def _check_order(self) -> Axes:
        if sorted(self.order) != sorted(AXIS_NAMES):
            raise ValueError(
                f"order must name each of {', '.join(AXIS_NAMES)} once; got {', '.join(self.order)}"
            )
        return self

    @model_serializer
    def _write_in_order(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in self.order}

    @property
    def world(self) -> int:
        """The number of ranks: the product of all degrees."""
        return math.prod(self.degree(axis) for axis in AXIS_NAMES)

    @property
    def data(self) -> int:
        """The number of ranks that see different data: replicate · shard."""
        return self.replicate * self.shard

    def degree(self, axis: str) -> int:
        """The degree of one axis by name."""
        return int(getattr(self, axis))
