"""Functional collectives, the same calls in a captured graph and in a real run; and a counter of all collectives that a
block of code calls.

The functional collectives of PyTorch, called at the operator level: no wrapper tensor, waited for at once.
Tensors are made contiguous, which the operators need. `counting` lists those that a block of code calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.compat import gloo as _gloo  # noqa: F401  registers kernels
from hyper_parallel.compat.local_tensor import int_on_rank, on_rank

__all__ = [
    "Collective",
    "all_gather",
    "all_gather_coalesced",
    "all_reduce",
    "all_to_all",
    "all_to_all_begun",
    "counting",
    "device_type",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "waited",
]

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    """The sum (or `max`) of `x` over the group, on every rank."""
    return waited(_ops.all_reduce(x.contiguous(), op, group))


def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """[d0, ...] of each rank to [size · d0, ...], in rank order. All ranks give the same shape."""
    return waited(_ops.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """[size · d0, ...] to [d0, ...]: each rank gets its chunk of dim 0 of the sum over the group."""
    return waited(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def all_gather_coalesced(xs: list[torch.Tensor], group: str, size: int) -> list[torch.Tensor]:
    """`all_gather` of several tensors in one call."""
    return [waited(x) for x in _ops.all_gather_into_tensor_coalesced(xs, size, group)]


def reduce_scatter_coalesced(xs: list[torch.Tensor], group: str, size: int) -> list[torch.Tensor]:
    """`reduce_scatter` of several tensors in one call."""
    return [waited(x) for x in _ops.reduce_scatter_tensor_coalesced(xs, "sum", size, group)]


def all_to_all(x: torch.Tensor, send: list[int], receive: list[int], group: str) -> torch.Tensor:
    """[sum(send), ...] to [sum(receive), ...]: `send[i]` rows of each rank, in order, to rank i of the group."""
    return waited(_ops.all_to_all_single(x.contiguous(), receive, send, group))


def all_to_all_begun(x: torch.Tensor, send: list[int], receive: list[int], group: str) -> torch.Tensor:
    """`all_to_all` that has begun: its result may be used once it went through `waited`, and `x` written then."""
    begun: torch.Tensor = _ops.all_to_all_single(x.contiguous(), receive, send, group)
    return begun


def waited(x: torch.Tensor) -> torch.Tensor:
    """The result of a collective that has begun, once it is there."""
    done: torch.Tensor = _ops.wait_tensor(x)
    return done


def device_type() -> str:
    """The type of device whose tensors the default process group moves."""
    if dist.get_backend() in ("gloo", "fake", "mpi"):
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


# Every collective that a block of code calls, counted as it passes PyTorch's dispatcher.
#
# Functional collectives and those of `torch.distributed` (FSDP2 calls these) are seen alike, under fake process
# groups, simulated ranks and real ones, in the backward pass too. Nothing is changed or waited for.
#
# What a rank must receive, whatever the algorithm, is the *volume* of a collective; with b_in and b_out the bytes
# of its input and output and n ranks in the group, as rings and pairwise exchanges reach it
# (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005):
#
# | kind | received by each rank |
# |---|---|
# | `all_gather` | b_out · (n − 1) / n |
# | `reduce_scatter` | b_in · (n − 1) / n |
# | `all_reduce` | b_in · 2 (n − 1) / n, a reduce-scatter and an all-gather |
# | `all_to_all` | b_out less the rank's own chunk |
# | `broadcast`, `recv` | b_out (the root of a broadcast receives nothing; it is counted as any other rank) |
# | `scatter`, `gather`, `reduce` | the root's share is the group's: b_out, b_out and b_in · (n − 1) / n |
# | `send` | 0 |


@dataclass(frozen=True)
class Collective:
    """One call of a collective, as one rank made it."""

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `reduce`, `gather`, `scatter`,
    `send` or `recv`."""
    group: str
    """The name of the process group."""
    ranks: tuple[int, ...]
    """The global ranks of the group; of `send` and `recv` the sender's and the receiver's."""
    bytes_in: int
    """Bytes of the tensors that the rank gave."""
    bytes_out: int
    """Bytes of the tensors that the rank got."""
    bytes_received: int
    """Bytes that had to come from other ranks: the table in this module's heading."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)


@contextlib.contextmanager
def counting() -> Iterator[list[Collective]]:
    """The collectives that are called inside the block, in order; the list grows while the block runs.

    Each is counted as this process's rank makes it. Under `simulated_ranks` (enter that first) one call stands for
    all ranks and is counted as rank 0 makes it.
    """
    counter = _Counter()
    with counter:
        yield counter.counted


FUNCTIONAL: Mapping[str, tuple[str, int]] = {
    "all_reduce": ("all_reduce", 2),
    "all_reduce_": ("all_reduce", 2),
    "all_reduce_coalesced": ("all_reduce", 2),
    "all_reduce_coalesced_": ("all_reduce", 2),
    "all_gather_into_tensor": ("all_gather", 2),
    "all_gather_into_tensor_out": ("all_gather", 2),
    "all_gather_into_tensor_coalesced": ("all_gather", 2),
    "reduce_scatter_tensor": ("reduce_scatter", 3),
    "reduce_scatter_tensor_out": ("reduce_scatter", 3),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 3),
    "all_to_all_single": ("all_to_all", 3),
    "broadcast": ("broadcast", 2),
    "broadcast_": ("broadcast", 2),
    "isend": ("send", 3),
    "irecv": ("recv", 3),
}
"""Functional operators: their kind and which argument is the group. The first is the input, the result the output."""
# Those of torch.distributed: their kind and which arguments are the output, the input and the group.
_IN_PLACE: Mapping[str, tuple[str, int | None, int | None, int]] = {
    "allreduce_": ("all_reduce", 0, 0, 1),
    "allreduce_coalesced_": ("all_reduce", 0, 0, 1),
    "allgather_": ("all_gather", 0, 1, 2),
    "allgather_coalesced_": ("all_gather", 0, 1, 2),
    "_allgather_base_": ("all_gather", 0, 1, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 1, 2),
    "reduce_scatter_": ("reduce_scatter", 0, 1, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 0, 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 0, 1, 2),
    "alltoall_": ("all_to_all", 0, 1, 2),
    "alltoall_base_": ("all_to_all", 0, 1, 2),
    "broadcast_": ("broadcast", 0, 0, 1),
    "reduce_": ("reduce", 0, 0, 1),
    "gather_": ("gather", 0, 1, 2),
    "scatter_": ("scatter", 0, 1, 2),
    "send": ("send", None, 0, 1),
    "recv_": ("recv", 0, None, 1),
    "recv_any_source_": ("recv", 0, None, 1),
}


class _Counter(TorchDispatchMode):
    """Notes each collective on its way to the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        space = func.namespace
        if space in ("_c10d_functional", "_c10d_functional_autograd"):
            self._functional(func.overloadpacket.__name__, args, result)
        elif space == "c10d":
            self._in_place(func.overloadpacket.__name__, args)
        return result

    def _functional(self, name: str, args: Sequence[Any], result: Any) -> None:
        if name not in FUNCTIONAL:
            return
        kind, at = FUNCTIONAL[name]
        given = 0 if kind == "recv" else _bytes(args[0])
        got = 0 if kind == "send" else _bytes(result)
        kept = None
        if kind == "all_to_all":
            kept = _own_rows(args[2], args[at], args[0])
        self._note(kind, args[at], given, got, kept, args[1] if kind in ("send", "recv") else None)

    def _in_place(self, name: str, args: Sequence[Any]) -> None:
        if name not in _IN_PLACE:
            return
        kind, output, source, at = _IN_PLACE[name]
        given = 0 if source is None else _bytes(args[source])
        got = 0 if output is None else _bytes(args[output])
        group = dist.ProcessGroup.unbox(args[at])
        kept = None
        if name == "alltoall_base_" and args[4]:
            kept = _own_rows(args[4], group, args[1])
        elif name == "alltoall_":
            kept = _bytes(args[1][_place(group)])
        peer = args[2] if name in ("send", "recv_") else None
        self._note(kind, group, given, got, kept, peer)

    def _note(self, kind: str, group: Any, given: int, got: int, kept: int | None, peer: int | None) -> None:
        process_group = _group(group)
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if peer is not None:
            ranks = (dist.get_rank(), ranks[peer])[:: 1 if kind == "send" else -1]
        received = _received(kind, given, got, len(ranks), kept)
        self.counted.append(Collective(kind, str(process_group.group_name), ranks, given, got, received))


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        tensor = on_rank(tensors, dist.get_rank())
        return int(tensor.numel()) * tensor.element_size()
    return sum(map(_bytes, tensors))


def _own_rows(send: Sequence[Any], group: Any, given: torch.Tensor) -> int:
    """Bytes of the rows that this rank sends to itself."""
    rank = dist.get_rank()
    tensor = on_rank(given, rank)
    rows = int(tensor.shape[0])
    own = int_on_rank(send[_place(_group(group))], rank)
    return int(tensor.numel()) * tensor.element_size() // rows * own if rows else 0


def _place(group: dist.ProcessGroup) -> int:
    """Where this rank stands in its group."""
    return dist.get_process_group_ranks(group).index(dist.get_rank())


def _group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    named: dist.ProcessGroup = c10d._resolve_process_group(group)  # type: ignore[attr-defined]
    return named


def _received(kind: str, given: int, got: int, size: int, kept: int | None) -> int:
    if kind == "all_to_all":
        return got - (got // size if kept is None else kept)
    if kind == "all_reduce":
        return 2 * given * (size - 1) // size
    if kind in ("reduce_scatter", "reduce"):
        return given * (size - 1) // size
    if kind in ("all_gather", "gather"):
        return got * (size - 1) // size
    return 0 if kind == "send" else got
