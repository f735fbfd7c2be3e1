"""Rank agreement: an error on one rank becomes an error on all, so that none waits forever."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx

from hyper_parallel.errors import BudgetError, CaptureError, FollowsError
from hyper_parallel.graph import StepGraph, is_collective
from hyper_parallel.overlap.collective_order import DIGEST, described
from hyper_parallel.shard import ShardedModel
from hyper_parallel.units import format_bytes

T = TypeVar("T")


def agreed(
    handle: ShardedModel | None,
    make: Callable[[], T],
    digest: Callable[[T], bytes] = lambda made: bytes(DIGEST),
) -> T:
    """Return what `make` returns on this rank, once it has succeeded on every rank.

    Every rank calls it; it all-reduces a few numbers. `make` itself must not communicate. `handle` None is a model on
    one device, without communication. `digest`: of what is made, `DIGEST` bytes that are the same on every rank. Raises
    what `make` raises; a BudgetError then has the least budget that is enough for every rank. Raises FollowsError where
    `make` raised on other ranks only, and CaptureError where digests differ.
    """
    if handle is None or handle.mesh.world == 1:
        return make()
    made, error, own = [], None, bytes(DIGEST)
    try:
        made.append(make())
        own = digest(made[0])
    # The other ranks learn of any error before it is raised here.
    except Exception as raised:
        error = raised
    floor = error.floor if isinstance(error, BudgetError) else None
    numbers = [int(error is not None), floor or 0, *own, *(-byte for byte in own)]
    told = torch.tensor(numbers, dtype=torch.int64, device=handle.device)
    failed, most, *digests = handle.all_reduce(told, handle.mesh.names, "max").tolist()
    if error is not None:
        if isinstance(error, BudgetError) and floor is not None and most > floor:
            raise BudgetError(
                f"{error}; another worker needs more: {format_bytes(most)}", error.why, most
            ) from error
        raise error
    if failed:
        raise FollowsError(
            "hp.offload: the passes of the model have no plan on another worker, whose log says why, and none of the "
            "workers runs them"
        )
    if digests[:DIGEST] != [-byte for byte in digests[DIGEST:]]:
        raise CaptureError(
            f"hp.offload: the code of {type(handle.model).__name__} computes with other weights, or writes or returns "
            "something else, on some workers than on others, so that their graphs would exchange different tensors; "
            "have every worker run the same code, or train it without hp.offload and lowering='traceable'"
        )
    return made[0]


def program_digest(step: StepGraph) -> bytes:
    """What has to be the same on every rank: the collectives, in order, and what the step gives."""
    text = hashlib.blake2b(digest_size=DIGEST)
    names = dict(zip(step.placeholders, (entry.name for entry in step.inputs), strict=True))
    returned: Any = step.output.args[0]
    names |= zip(returned, step.outputs, strict=True)
    for node in step.nodes:
        if is_collective(node):
            text.update(f"{_whose(node, names)} {described(step, node)}\n".encode())
    text.update(" ".join(step.outputs).encode())
    return text.digest()


def _whose(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The name of the input that a collective gathers, or of the output that it reduces, where it is only one."""
    source = user = node
    while len(source.all_input_nodes) == 1:
        (source,) = source.all_input_nodes
    while user not in names and len(user.users) == 1:
        (user,) = user.users
    return names.get(source) or names.get(user, "")
