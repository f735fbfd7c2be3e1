"""`placement` section: link level of each axis, and devices per level.

Levels from the inside out: a `node`'s devices share the fastest links, a `supernode` joins nodes by links nearly as
fast, the `network` joins the supernodes. The axes of an inner level are the inner ones in rank order, so neighbouring
ranks are those with the fastest links.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hyper_parallel.errors import nearest
from hyper_parallel.strategy.axes import AXIS_NAMES, Axes
from hyper_parallel.strategy.section import Section

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
