"""Collectives of CPU tensors, by those ways through gloo that are right and quick.

Gathers. In PyTorch 2.13 `all_gather_into_tensor` of `torch.ops._c10d_functional` calls its coalesced sibling even for
one tensor, and gloo's coalesced gather damages memory as soon as two are under way: within seconds the C library aborts
with `malloc(): unaligned tcache chunk detected` in a thread of gloo's, or a worker is lost.
`all_gather_into_tensor_out` takes another way through gloo, that of `torch.distributed.all_gather_into_tensor`, which
`tests/compat/test_gathers.py` holds to thousands of gathers with several under way.

Reduce-scatters. gloo carries one out as an all-reduce of the whole, and a coalesced one tensor after tensor. Here the
ranks exchange what they have for each other in one all-to-all, and each sums what it was sent:

    y_r = ((x_0[r] + x_1[r]) + x_2[r]) + …          x_i[r]: what rank i has for rank r      `_add_up`

half precision in float32, rounded once. An element's sum has one order, that of the ranks, whatever lies beside it in
the call; so it has the same bits taken alone, in a bucket, or by FSDP2.

Coalesced calls. Tensors that are small when whole are packed into one message (`buckets`): among workers that take
turns on few cores a call costs milliseconds, and a copy of a megabyte less than one.

The sums, and the copies out of a pack, are made by the thread that waits, when it waits. CPU tensors have no kernels of
their own for these operators, so that these are theirs. What a graph or a count of collectives shows is unchanged.

The end of a process. gloo's threads let go of a collective's tensors a moment after it is over, and need the
interpreter's lock for it. Where the interpreter shuts down in that moment, CPython ends the thread on its way out of a
C++ function, and the whole process aborts ("terminate called without an active exception"): see `compat.cpu`.
Destroying the process group joins those threads, so that is done at exit.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work

from hyper_parallel.compat.cpu import PATIENCE

PACKED = 2**20
"""Bytes of a whole tensor up to which it is packed with others: from there on the copies cost what a call does."""
NARROW = (torch.bfloat16, torch.float16)
"""Dtypes that are summed in float32."""

_ops = torch.ops._c10d_functional
_library = torch.library.Library("_c10d_functional", "IMPL")


def buckets(wholes: Sequence[tuple[Hashable, int]]) -> list[list[int]]:
    """The tensors of a coalesced call by the message that they travel in; `wholes` are their dtypes, and bytes when
    whole: of a gather's results, or of what is scattered.

    >>> buckets([("float32", 4096), ("float32", 2**21), ("float32", 512), ("bfloat16", 512)])
    [[0, 2], [1], [3]]
    """
    found: list[list[int]] = []
    of_dtype: dict[Hashable, list[int]] = {}
    for index, (dtype, size) in enumerate(wholes):
        if size <= PACKED and dtype in of_dtype:
            of_dtype[dtype].append(index)
            continue
        found.append([index])
        if size <= PACKED:
            of_dtype[dtype] = found[-1]
    return found


class _Finished(dist.Work):
    """A collective under way whose results are finished when somebody waits for the first of them.

    Who registers it keeps it alive: `_register_work` wraps a work of Python's together with its object.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


def _begun(results: Sequence[torch.Tensor], finish: Callable[[], None]) -> None:
    """Have `finish` run when the first of the results is waited for."""
    work = _Finished(finish)
    for result in results:
        _register_work(result, work)


def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """[d0, ...] of each rank to [size · d0, ...]; begun when this returns."""
    gathered = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    _ops.all_gather_into_tensor_out(x, size, group, out=gathered)
    return gathered


def _all_gather_coalesced(xs: list[torch.Tensor], size: int, group: str) -> list[torch.Tensor]:
    results: dict[int, torch.Tensor] = {}
    for bucket in buckets([(x.dtype, size * x.nbytes) for x in xs]):
        if len(bucket) == 1:
            results[bucket[0]] = _all_gather(xs[bucket[0]], size, group)
            continue
        packed = torch.cat([xs[index].reshape(-1) for index in bucket])
        gathered = _all_gather(packed, size, group)
        outputs = [xs[index].new_empty((size * xs[index].shape[0], *xs[index].shape[1:])) for index in bucket]
        results.update(zip(bucket, outputs, strict=True))
        _begun(outputs, partial(_unpack, packed, gathered, outputs, size))
    return [results[index] for index in range(len(xs))]


def _unpack(packed: torch.Tensor, gathered: torch.Tensor, results: Sequence[torch.Tensor], size: int) -> None:
    ranks = _ops.wait_tensor(gathered).view(size, -1)
    parts = ranks.split([result.numel() // size for result in results], dim=1)
    for result, part in zip(results, parts, strict=True):
        result.view(size, -1).copy_(part)
    _give_up(packed, gathered)


def _reduce_scatter(x: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    """[size · d0, ...] to [d0, ...]: this rank's chunk of the sum over the ranks; begun when this returns."""
    return _reduce_scatter_coalesced([x], op, size, group)[0]


def _reduce_scatter_coalesced(xs: list[torch.Tensor], op: str, size: int, group: str) -> list[torch.Tensor]:
    results = [x.new_empty((x.shape[0] // size, *x.shape[1:])) for x in xs]
    if op not in ("sum", "avg") or any(x.is_complex() for x in xs):
        for x, result in zip(xs, results, strict=True):
            _ops.reduce_scatter_tensor_out(x, op, size, group, out=result)
        return results
    for bucket in buckets([(x.dtype, x.nbytes) for x in xs]):
        for_ranks = [xs[index].reshape(size, -1) for index in bucket]
        packed = (for_ranks[0] if len(bucket) == 1 else torch.cat(for_ranks, dim=1)).view(-1)
        given = {xs[index].untyped_storage().data_ptr() for index in bucket}
        own = [packed] if packed.untyped_storage().data_ptr() not in given else []
        even = [packed.numel() // size] * size
        sent = _ops.all_to_all_single(packed, even, even, group)
        outputs = [results[index] for index in bucket]
        _begun(outputs, partial(_add_up, own, sent, outputs, size, mean=op == "avg"))
    return results


def _add_up(
    own: Sequence[torch.Tensor],
    sent: torch.Tensor,
    results: Sequence[torch.Tensor],
    size: int,
    *,
    mean: bool,
) -> None:
    first, *others = _ops.wait_tensor(sent).view(size, -1)
    total = first.float() if first.dtype in NARROW else first
    for other in others:
        total.add_(other)
    if mean:
        total.div_(size)
    for result, part in zip(results, total.split([result.numel() for result in results]), strict=True):
        result.view(-1).copy_(part)
    _give_up(*own, sent)


def _give_up(*tensors: torch.Tensor) -> None:
    """Give their memory back now: gloo's threads may hold the tensors for a moment after the collective is over."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


@atexit.register
def _join_threads() -> None:
    """Wait for gloo's threads at exit, for `PATIENCE` seconds: what they still do may wait for a rank that is gone.

    After an error nothing is waited for.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo" or hasattr(sys, "last_value"):
        return
    ended = threading.Thread(target=dist.destroy_process_group, daemon=True)
    ended.start()
    ended.join(PATIENCE)


_library.impl("all_gather_into_tensor", _all_gather, "CPU")
_library.impl("all_gather_into_tensor_coalesced", _all_gather_coalesced, "CPU")
_library.impl("reduce_scatter_tensor", _reduce_scatter, "CPU")
_library.impl("reduce_scatter_tensor_coalesced", _reduce_scatter_coalesced, "CPU")
