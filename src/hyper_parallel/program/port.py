"""Port: a value that crosses between tasks, and its layout in each device group that holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hyper_parallel.layout import Layout
from hyper_parallel.workload.work import bytes_of


@dataclass(frozen=True)
class Port:
    """A value that crosses from one task to another.

    The gradient of a value is a port of its own, with a layout of its own: a gradient to which every replica has its
    share is `partial` over the axis of the replicas, one that every replica holds in full is not.
    """

    name: str
    layout: Layout
    """In the group that computes the value."""
    dtype: str
    """As torch names it: ``bfloat16``."""
    group: str
    """The name of the device group that computes the value."""
    received: Mapping[str, Layout] = field(default_factory=dict, hash=False)
    """By receiving group: the layout in which it takes the value. A group that is left out has an equal mesh and takes
    the value in `layout`."""

    def layout_in(self, group: str) -> Layout:
        """The value's layout in a group that computes or receives it."""
        return self.layout if group == self.group else self.received.get(group, self.layout)

    def local_bytes(self, group: str) -> int:
        """Bytes of the value on the first rank of a group: the first chunks are the longest."""
        return bytes_of(self.dtype) * math.prod(self.layout_in(group).local_shape({}))
