"""All ranks in one process: PyTorch's local-tensor mode over the fake process group.

A value that differs between ranks is made by `per_rank` (a tensor) or `per_rank_int` (a size). Under
`simulated_ranks` they give one value that holds every rank's; in a real process they give this rank's own.
Code that uses them runs unchanged under both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _local_tensor
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    enabled_local_tensor_mode,
)
from torch.nn.functional import linear

from hyper_parallel.errors import SimulationError


@contextlib.contextmanager
def simulated_ranks(world: int) -> Iterator[None]:
    """Run the block as `world` ranks at once, in this process, collectives included.

    Transformers skips a mask where a look at the values tells that none is needed, except while it is traced. Where
    the ranks' values would answer differently it counts as traced, so that all ranks compute with the mask.

    Raises RuntimeError when a process group exists already, and SimulationError where the model's own code branches on
    values that differ between ranks, or has sizes that do, which one process cannot follow.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("ranks cannot be simulated in a process that has a process group already")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with uneven_products(), LocalTensorMode(world), _traced_where_ranks_differ():
            yield
    except (AttributeError, AssertionError, NotImplementedError, TypeError) as error:
        if not _is_of_the_simulation(error):
            raise
        raise SimulationError(
            "the model's code branches on values that differ between ranks, which the ranks of one process cannot "
            "follow; run them as real processes: hyper-parallel verify --driver gloo"
        ) from error
    finally:
        dist.destroy_process_group()


def _is_of_the_simulation(error: Exception) -> bool:
    """Whether PyTorch's local-tensor mode gave up, rather than the model or a kernel."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    inside = frame.f_code.co_filename == _local_tensor.__file__
    return inside or any(name in str(error) for name in (LocalIntNode.__name__, "_SymNode"))


@contextlib.contextmanager
def _traced_where_ranks_differ() -> Iterator[None]:
    """`is_tracing` of Transformers, wherever it was imported to, is true of tensors that differ between ranks."""
    name = "is_tracing"
    home = sys.modules.get("transformers.utils.import_utils")
    theirs: Any = getattr(home, name, None)
    if theirs is None:  # nothing of Transformers runs here
        yield
        return

    def is_tracing(tensor: Any = None) -> bool:
        return bool(theirs(tensor)) or _differs(tensor)

    users = [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("transformers.") and vars(module).get(name) is theirs
    ]
    for module in users:
        setattr(module, name, is_tracing)
    try:
        yield
    finally:
        for module in users:
            setattr(module, name, theirs)


def _differs(tensor: Any) -> bool:
    if not isinstance(tensor, LocalTensor):
        return False
    with one_device():
        first, *others = tensor._local_tensors.values()
        return any(not torch.equal(first, other) for other in others)


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
    """The value on one simulated rank of an integer that may differ between them."""
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


def agreed(tensor: torch.Tensor) -> torch.Tensor:
    """One rank's copy, on the CPU, of a tensor that all ranks should hold alike; NaN where they do not."""
    with one_device():
        first, *others = each_rank(tensor).values()
        same = all(torch.equal(first, other) for other in others)
        return first.detach().cpu().clone() if same else torch.full_like(first, torch.nan, device="cpu")


# Matrix products of tensors whose sizes differ between simulated ranks.
#
# PyTorch 2.11 reads the sizes of the arguments of `matmul` and `linear` as plain numbers, before it comes to operators
# that local tensors have. Here they are written with such operators: `mm` and `bmm`.

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


@contextlib.contextmanager
def uneven_products(*, always: bool = False) -> Iterator[None]:
    """Inside, products are those of this module where this release of PyTorch does not have them, or `always`. Called
    outside of local-tensor modes."""
    if not (always or _missing()):
        yield
        return
    # On the class: a mode would not be there where a backward pass computes a layer again. PyTorch turns the functions
    # of classes off around a backward pass of their tensors.
    run_backward = torch.autograd._engine_run_backward
    before = vars(LocalTensor).get("__torch_function__")

    def with_functions(*args: Any, **given: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return run_backward(*args, **given)

    setattr(LocalTensor, "__torch_function__", classmethod(_with_uneven_products))  # noqa: B010
    torch.autograd._engine_run_backward = with_functions
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run_backward
        if before is None:
            del LocalTensor.__torch_function__
        else:
            setattr(LocalTensor, "__torch_function__", before)  # noqa: B010


@functools.cache
def _missing() -> bool:
    """Whether `linear` cannot do sizes that differ between ranks."""
    row = LocalTensor({rank: torch.zeros(1, 1, 1, device="cpu") for rank in range(2)})
    weight = LocalTensor({rank: torch.zeros(1 + rank, 1, device="cpu") for rank in range(2)})
    with LocalTensorMode(2), torch.no_grad():
        try:
            linear(row, weight)
        except RuntimeError:
            return True
    return False


def _with_uneven_products(
    cls: Any,
    func: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """The result of `func`: products of sizes that differ between ranks by `mm` and `bmm`, all else PyTorch's."""
    product = _linear if func is linear else _matmul if func in _MATMUL else None
    if product is None or not _uneven(args, kwargs or {}):
        return super(LocalTensor, cls).__torch_function__(func, types, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return product(*args, **(kwargs or {}))


def _uneven(args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    return any(
        isinstance(size, torch.SymInt)
        for one in (*args, *given.values())
        if isinstance(one, Tensor)
        for size in one.shape
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] by [O, I]."""
    if input.dim() == 1:
        return _linear(input[None], weight, bias).squeeze(0)
    rows = linear(input.flatten(0, -2), weight, bias)
    return rows.view(*input.shape[:-1], weight.size(0))


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """[..., M, K] by [..., K, N]; either may be a vector [K]."""
    if input.dim() == 1:
        return _matmul(input[None], other).squeeze(-2)
    if other.dim() == 1:
        return torch.mv(input.reshape(-1, input.size(-1)), other).view(input.shape[:-1])
    if other.dim() == 2:
        return _linear(input, other.t())
    pairs = itertools.zip_longest(input.shape[-3::-1], other.shape[-3::-1], fillvalue=1)
    batch = [second if first == 1 else first for first, second in pairs][::-1]
    one, two = (
        x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (input, other)
    )
    return torch.bmm(one, two).view(*batch, input.size(-2), other.size(-1))
