"""All ranks of a run in one process, a thread each, with collectives exchanged in memory.

Each rank is prepared alone (`preparing`), on its own fake process group: it makes its process groups, and what the
first rank broadcasts is repeated for the others, which come to the same broadcasts. Then all run at once (`run`): a
dispatch mode in each thread takes functional collectives out, and three functions of torch.distributed answer for the
thread's rank. A rank that waits for another one which has failed, or which does not come, ends with an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.errors import FollowsError, HyperParallelError

LIMIT_S = 120.0
"""For which a rank waits for the others of a collective."""
_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}

R = TypeVar("R")


class ThreadRanks:
    """The ranks of one run."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._groups: dict[int, dict[str, tuple[int, ...]]] = {}
        """Rank to the ranks of its process groups, by name."""
        self._handles: dict[int, tuple[int, ...]] = {}
        """The same by the identity of the group."""
        self._kept: list[Any] = []
        """Groups, so that no other one takes their identity."""
        self._told: list[list[Any]] = []
        """What the first rank broadcast."""
        self._hub = _Hub()

    @contextlib.contextmanager
    def preparing(self, rank: int) -> Iterator[None]:
        """The block prepares a rank; the ranks follow one another in order."""
        heard = iter(list(self._told))

        def broadcast(objects: list[Any], src: int = 0, *args: Any, **kwargs: Any) -> None:
            if rank == src == 0:
                self._told.append(list(objects))
            else:
                objects[:] = next(heard)

        with fake_ranks(self.world, rank), _replaced({"broadcast_object_list": broadcast}):
            yield
            self._groups[rank] = self._known_groups()

    def _known_groups(self) -> dict[str, tuple[int, ...]]:
        world = dist.distributed_c10d._world
        found: dict[str, tuple[int, ...]] = {}
        for group, name in world.pg_names.items():
            ranks = tuple(sorted(world.pg_group_ranks[group]))
            found[name] = ranks
            self._handles[id(group)] = ranks
            self._kept.append(group)
        return found

    def run(self, function: Callable[[int], R]) -> list[R]:
        """`function(rank)` on all ranks at once, and what each gives. Raises the error that others followed from."""
        with fake_ranks(self.world, 0):
            everyone = self._known_groups()
            for names in self._groups.values():
                names.update(everyone)
            with _replaced(self._functions()), ThreadPoolExecutor(self.world) as pool:
                futures = [pool.submit(self._ranks_part, function, rank) for rank in range(self.world)]
            errors = [error for future in futures if (error := future.exception()) is not None]
            for error in sorted(errors, key=lambda error: isinstance(error, FollowsError)):
                raise error
            return [future.result() for future in futures]

    def _ranks_part(self, function: Callable[[int], R], rank: int) -> R:
        _here.rank = rank
        torch.set_num_threads(1)
        try:
            with _Collectives(self._hub, rank, self._groups[rank]):
                return function(rank)
        except BaseException as error:
            self._hub.fail(rank, error)
            raise

    def _functions(self) -> dict[str, Callable[..., Any]]:
        def get_rank(group: Any = None) -> int:
            return int(_here.rank)

        def all_gather_object(into: list[Any], mine: Any, group: Any = None) -> None:
            into[:] = self._hub.exchange(tuple(range(self.world)), _here.rank, mine)

        def all_reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
            ranks = tuple(range(self.world)) if group is None else self._handles[id(group)]
            name = "max" if op == dist.ReduceOp.MAX else "sum"
            tensor.copy_(
                _REDUCTIONS[name](torch.stack(self._hub.exchange(ranks, _here.rank, tensor.clone())))
            )

        return {"get_rank": get_rank, "all_gather_object": all_gather_object, "all_reduce": all_reduce}


_here = threading.local()


@contextlib.contextmanager
def _replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Functions of torch.distributed are others in the block."""
    before = {name: getattr(dist, name) for name in functions}
    for name, function in functions.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


class _Hub:
    """Where the ranks of a group meet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._met: dict[tuple[tuple[int, ...], int], dict[int, Any]] = {}
        self._left: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._count: Counter[tuple[tuple[int, ...], int]] = Counter()
        """Of a group and one of its ranks: the calls so far."""
        self._failed = ""

    def exchange(self, ranks: tuple[int, ...], rank: int, value: Any) -> list[Any]:
        """Exchange the values of `ranks`; all of them, in their order. The k-th call of a rank meets the k-th of the
        others."""
        with self._changed:
            turn = (ranks, self._count[ranks, rank])
            self._count[ranks, rank] += 1
            met = self._met.setdefault(turn, {})
            met[rank] = value
            self._changed.notify_all()
            there = self._changed.wait_for(lambda: len(met) == len(ranks) or bool(self._failed), LIMIT_S)
            if len(met) < len(ranks):
                missing = [one for one in ranks if one not in met]
                why = self._failed if there else f"ranks {missing} did not come within {LIMIT_S:.0f} s"
                raise FollowsError(f"rank {rank} waits for a collective of ranks {list(ranks)}: {why}")
            self._left[turn] += 1
            if self._left[turn] == len(ranks):
                del self._met[turn], self._left[turn]
            return [met[one] for one in ranks]

    def fail(self, rank: int, error: BaseException) -> None:
        """A rank is over; who waits for it ends too."""
        with self._changed:
            self._failed = self._failed or f"rank {rank} failed: {type(error).__name__}: {error}"
            self._changed.notify_all()


class _Collectives(TorchDispatchMode):
    """Functional collectives of one rank's thread, exchanged in memory."""

    def __init__(self, hub: _Hub, rank: int, groups: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._hub, self._rank, self._groups = hub, rank, groups

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        name = func._schema.name.partition("::")[2]
        if name == "wait_tensor":
            return args[0]
        ranks = self._groups[given["group_name"]]
        place = ranks.index(self._rank)
        calls = self._hub.exchange(ranks, self._rank, (name, given))
        others = {other for other, _ in calls}
        if others != {name}:
            raise HyperParallelError(f"ranks {list(ranks)} come to {', '.join(sorted(others))} at once")
        result = _result(name, [one for _, one in calls], place)
        # Until all have read what they were given, which who gave it may change afterwards.
        self._hub.exchange(ranks, self._rank, None)
        return result


def _result(name: str, calls: Sequence[Mapping[str, Any]], place: int) -> Tensor | list[Tensor]:
    """The result on one rank of a group. `calls`: the arguments of each."""
    if name.endswith("_coalesced"):
        single = name.removesuffix("_coalesced")
        count = len(calls[place]["inputs"])
        each = [[{**call, "input": call["inputs"][at]} for call in calls] for at in range(count)]
        found = [_result(single, one, place) for one in each]
        return [one for one in found if isinstance(one, Tensor)]
    inputs: list[Tensor] = [call["input"] for call in calls]
    if name == "all_gather_into_tensor":
        return torch.cat(inputs)
    if name == "all_to_all_single":
        return torch.cat(
            [one.split(call["input_split_sizes"])[place] for one, call in zip(inputs, calls, strict=True)]
        )
    if name not in ("all_reduce", "reduce_scatter_tensor"):
        raise HyperParallelError(f"{name} is not emulated for ranks of one process")
    if name == "reduce_scatter_tensor":
        inputs = [one.chunk(len(calls))[place] for one in inputs]
    reduce: Callable[[Tensor], Tensor] = _REDUCTIONS[calls[place]["reduce_op"]]
    return reduce(torch.stack(inputs))
