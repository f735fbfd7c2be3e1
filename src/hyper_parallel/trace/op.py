"""One piece of work of one rank: a kernel, a collective, a copy between tiers, or something on the host."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.workload.work import Work

Kind = Literal["parameter", "gradient", "optimizer", "activation", "temporary", "input"]
"""What bytes are kept for."""

KINDS: tuple[Kind, ...] = ("parameter", "gradient", "optimizer", "activation", "temporary", "input")

_INDEX = re.compile(r"(^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Bytes:
    """A storage: bytes in one tier, alive from the op that allocates it to the op that frees it."""

    storage: int
    """Its number, one of its kind in its rank class. A copy in another tier is another storage."""
    bytes: int
    kind: Kind
    tier: str = "device"
    """The name of a tier of the cluster."""
    name: str = ""
    """What it is called where no op tells: a parameter's name, say."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A call that several ranks make together; it runs when all of them have come to it.

    `send` and `recv` are the two halves of one call, of the ranks (from, to).
    """

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `recv`, `barrier`, …"""
    ranks: tuple[int, ...]
    """The global ranks of the group."""
    bytes: int
    """Bytes that a rank gives (for `recv`: that it gets)."""
    axis: str = ""
    """The axis of the mesh that the group lies along."""
    tag: str = ""
    """Matches the calls of different rank classes: the n-th call of a tag and group in one with the n-th in others."""

    @property
    def paired(self) -> bool:
        """One rank with one other, as between the stages of a pipeline."""
        return self.kind in ("send", "recv")


@dataclass(frozen=True, slots=True)
class Op:
    """A piece of work of one rank. It has `work`, or a `collective`, or neither (it takes no time)."""

    index: int
    """Its place in its rank class's list."""
    name: str
    module: str = ""
    """The name of the module that asked for it, such as `model.layers.3.mlp`."""
    phase: str = ""
    """`forward`, `loss`, `backward`, `clip` or `optimizer`."""
    queue: str = "compute"
    """What it is put on, and waits in order for: `compute`, another compute queue (`compute:vector`), `comm:<axis>`,
    `copy:<from>><to>` with the names of two tiers, or `host`."""
    work: Work | None = None
    """What a kernel does; of a copy between tiers, `read` is how many bytes it moves."""
    collective: Collective | None = None
    after: tuple[int, ...] = ()
    """Indices of the ops that must have ended, all below its own."""
    allocates: tuple[Bytes, ...] = ()
    """Storages that are alive from its start."""
    frees: tuple[int, ...] = ()
    """Numbers of the storages that are no longer alive after its end."""
    recomputed: bool = False
    """It is the second time that a piece of the forward pass runs."""

    @property
    def engine(self) -> str:
        """What it occupies while it runs: `matrix` or `vector` for a kernel, else its queue."""
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
    """A module's name with `*` for every index, so that equal layers fall together.

    >>> pattern("model.layers.3.mlp.experts.7")
    'model.layers.*.mlp.experts.*'
    """
    return _INDEX.sub(r"\1*", module)
