"""Gathers on the CPU, by way of the operator that does not damage memory.

In PyTorch 2.13 `all_gather_into_tensor` of `torch.ops._c10d_functional` calls its coalesced sibling even for one
tensor, and gloo's coalesced gather damages memory as soon as two are under way: within seconds the C library aborts
with `malloc(): unaligned tcache chunk detected` in a thread of gloo's, or a worker is lost.
`all_gather_into_tensor_out` takes another way through gloo, that of `torch.distributed.all_gather_into_tensor`, which
`tests/compat/test_gathers.py` holds to thousands of gathers with several under way. CPU tensors have no kernels of
their own for the two operators, so that these are theirs. What a graph or a count of collectives shows is unchanged.
"""

from __future__ import annotations

import torch

_ops = torch.ops._c10d_functional
_library = torch.library.Library("_c10d_functional", "IMPL")


def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """[d0, ...] of each rank to [size · d0, ...]; begun when this returns."""
    gathered = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    _ops.all_gather_into_tensor_out(x, size, group, out=gathered)
    return gathered


def _all_gather_coalesced(xs: list[torch.Tensor], size: int, group: str) -> list[torch.Tensor]:
    return [_all_gather(x, size, group) for x in xs]


_library.impl("all_gather_into_tensor", _all_gather, "CPU")
_library.impl("all_gather_into_tensor_coalesced", _all_gather_coalesced, "CPU")
