"""Tier operators: the four graph operators that move a storage between memory tiers.

    store(x, slot, tier)      begins to copy the storage of x into its slot in another tier
    prefetch(x, slot, tier)   gives the storage memory again and begins to fill it from the slot
    wait(x, slot, tier)       what follows finds the last copy to or from the slot over
    detach(x, slot, tier)     gives the storage's memory up, since the slot holds what is in it

After HyperOffload (arXiv 2602.00748, section 3), in place: the storage loses and regains its memory, so that every view
of it, and a parameter that lies in it, stay the objects that they are. When bytes are there follows from the order of
the nodes alone, and not from how fast copies are: before a `detach` stands the `wait` for its `store`, and from the
`prefetch` on the memory is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from torch import fx

from hyper_parallel.errors import HyperParallelError

Rest = Literal["step", "here", "away"]
"""Between steps a slot is of no use (`step`); or it holds what lives on, which is on the device too (`here`) or only in
the slot (`away`)."""


@dataclass(frozen=True)
class Slot:
    """The place of a storage in a tier."""

    storage: int
    tier: str
    bytes: int
    rest: Rest = "step"
    first: int = 0
    """Of the step's nodes before its moves, the one before which the first copy to the slot begins."""
    last: int = 0
    """The one before which the last copy from it is waited for. Of what rests here the slot is always needed."""


def store(x: Any, slot: int, tier: str) -> NoReturn:
    """Begin to copy the storage of `x` into its slot."""
    _nobody("store", slot)


def prefetch(x: Any, slot: int, tier: str) -> NoReturn:
    """Give the storage of `x` memory, and begin to fill it from its slot."""
    _nobody("prefetch", slot)


def wait(x: Any, slot: int, tier: str) -> NoReturn:
    """Wait until the last copy to or from the slot is over."""
    _nobody("wait", slot)


def detach(x: Any, slot: int, tier: str) -> NoReturn:
    """Give up the memory of the storage of `x`."""
    _nobody("detach", slot)


def is_cache(node: fx.Node) -> bool:
    """Whether a node is one of the four."""
    return node.op == "call_function" and node.target in OPERATORS


def slot_of(node: fx.Node) -> int:
    """The slot that a cache operator is about."""
    assert is_cache(node), f"{node} ({node.target}) moves nothing"
    slot = node.args[1]
    assert isinstance(slot, int)
    return slot


OPERATORS = (store, prefetch, wait, detach)


def _nobody(name: str, slot: int) -> NoReturn:
    raise HyperParallelError(
        f"{name} of slot {slot} was reached outside of a graph that is given its memories"
    )
