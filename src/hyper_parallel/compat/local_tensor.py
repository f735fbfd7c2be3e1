"""All ranks in one process: PyTorch's local-tensor mode over the fake process group.

A value that differs between ranks is made by `per_rank` (a tensor) or `per_rank_int` (a size). Under
`simulated_ranks` they give one value that holds every rank's; in a real process they give this rank's own.
Code that uses them runs unchanged under both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    enabled_local_tensor_mode,
)


@contextlib.contextmanager
def simulated_ranks(world: int) -> Iterator[None]:
    """Run the block as `world` ranks at once, in this process, collectives included.

    Raises RuntimeError when a process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("ranks cannot be simulated in a process that has a process group already")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with LocalTensorMode(world):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Inside `simulated_ranks`: run the block on ordinary tensors."""
    mode = enabled_local_tensor_mode()
    if mode is None:
        yield
        return
    with mode.disable():
        yield


def is_simulated() -> bool:
    """Whether this code runs as several ranks at once."""
    return enabled_local_tensor_mode() is not None


def per_rank(make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """The tensor that `make(rank)` gives, on every rank that runs here."""
    mode = enabled_local_tensor_mode()
    if mode is None:
        return make(dist.get_rank() if dist.is_initialized() else 0)
    with mode.disable():
        return LocalTensor({rank: make(rank) for rank in sorted(mode.ranks)})


def per_rank_int(make: Callable[[int], int]) -> int:
    """The integer that `make(rank)` gives; under simulation one SymInt that holds every rank's."""
    mode = enabled_local_tensor_mode()
    if mode is None:
        return make(dist.get_rank() if dist.is_initialized() else 0)
    values = {rank: make(rank) for rank in sorted(mode.ranks)}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return torch.SymInt(LocalIntNode(values))  # type: ignore[return-value]


def is_per_rank(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds every simulated rank's."""
    return isinstance(tensor, LocalTensor)


def int_on_rank(value: int, rank: int) -> int:
    """What an integer, which may differ between simulated ranks, is on one of them."""
    node = value.node if isinstance(value, torch.SymInt) else None
    return node._local_ints[rank] if isinstance(node, LocalIntNode) else int(value)


def on_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The tensor of one simulated rank; the tensor itself where nothing is simulated."""
    return tensor._local_tensors[rank] if isinstance(tensor, LocalTensor) else tensor


def each_rank(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """Rank to tensor, of every rank that runs here."""
    if isinstance(tensor, LocalTensor):
        return dict(tensor._local_tensors)
    return {dist.get_rank() if dist.is_initialized() else 0: tensor}
