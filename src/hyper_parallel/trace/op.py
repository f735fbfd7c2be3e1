"""One piece of work of one rank: a kernel, a collective, a copy between tiers, or something on the host."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.workload.work import Work

Kind = Literal["parameter", "gradient", "optimizer", "activation", "temporary", "input"]
"""Kinds of storages."""

KINDS: tuple[Kind, ...] = ("parameter", "gradient", "optimizer", "activation", "temporary", "input")

_INDEX = re.compile(r"(^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Bytes:
    """A storage: bytes in one tier, alive from the op that allocates it to the op that frees it."""

    storage: int
    """Its number, unique in its rank class. A copy in another tier is another storage."""
    bytes: int
    kind: Kind
    tier: str = "device"
    """The name of a tier of the cluster."""
    name: str = ""
    """Its name if no op allocates it, such as a parameter's."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A call that several ranks make together; it runs once all of them have reached it.

    `send` and `recv` are the two halves of one call, of the ranks (from, to).
    """

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `recv`, `barrier`, …"""
    ranks: tuple[int, ...]
    """The global ranks of the group."""
    bytes: int
    """Bytes that a rank gives (for `recv`: that it receives)."""
    axis: str = ""
    """The mesh axis of the group."""
    tag: str = ""
    """Matches the calls of different rank classes: the n-th call of a tag and group in each class."""

    @property
    def paired(self) -> bool:
        """Whether it is point-to-point, as between the stages of a pipeline."""
        return self.kind in ("send", "recv")


@dataclass(frozen=True, slots=True)
class Op:
    """A piece of work of one rank. It has `work`, or a `collective`, or neither (it takes no time)."""

    index: int
    """Its place in its rank class's list."""
    name: str
    module: str = ""
    """The name of the module that ran it, such as `model.layers.3.mlp`."""
    phase: str = ""
    """`forward`, `loss`, `backward`, `clip` or `optimizer`."""
    queue: str = "compute"
    """Its queue, which runs in order: `compute`, another compute queue (`compute:vector`), `comm:<axis>`,
    `copy:<from>><to>` with the names of two tiers, or `host`.
    """
    work: Work | None = None
    """The work of a kernel; for a copy between tiers, `read` is the bytes that it moves."""
    collective: Collective | None = None
    after: tuple[int, ...] = ()
    """Indices of the ops that it waits for, all below its own."""
    allocates: tuple[Bytes, ...] = ()
    """Storages that it allocates: alive from its start."""
    frees: tuple[int, ...] = ()
    """Numbers of the storages that it frees: alive until its end."""
    recomputed: bool = False
    """Whether it recomputes a part of the forward pass."""

    @property
    def engine(self) -> str:
        """The engine that it occupies: `matrix` or `vector` for a kernel, else its queue."""
        if not is_compute(self.queue):
            return self.queue
        return "matrix" if self.work and self.work.kind in ("matmul", "attention") else "vector"

    @property
    def part(self) -> str:
        """The phase, or `recompute`."""
        return "recompute" if self.recomputed else self.phase

    @property
    def sort(self) -> str:
        """The kind of work: a `Work`'s or a `Collective`'s kind, or `none`."""
        return self.work.kind if self.work else self.collective.kind if self.collective else "none"


def is_compute(queue: str) -> bool:
    """Whether kernels run on a queue of that name."""
    return queue == "compute" or queue.startswith("compute:")


def is_comm(queue: str) -> bool:
    """Whether collectives run on a queue of that name."""
    return queue.startswith("comm:")


def copy_tiers(queue: str) -> tuple[str, str] | None:
    """The tiers (from, to) of a copy queue's name, None where it is none.

    >>> copy_tiers("copy:device>host")
    ('device', 'host')
    """
    source, arrow, target = queue.removeprefix("copy:").partition(">")
    return (source, target) if queue.startswith("copy:") and arrow and source and target else None


def pattern(module: str) -> str:
    """A module's name with `*` for every index, so that equal layers have the same name.

    >>> pattern("model.layers.3.mlp.experts.7")
    'model.layers.*.mlp.experts.*'
    """
    return _INDEX.sub(r"\1*", module)
