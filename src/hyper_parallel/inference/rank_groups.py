"""Groups of workers that compute the same passes: replicas, context-parallel groups, and agreement on numbers.

Ranks that differ along `replicate` are in different replicas, which run independently: a forward pass has no collective
over that axis. Ranks of one replica run in lockstep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.inference.ragged_pass import WIDE, Segment
from hyper_parallel.shard.sharded_model import ShardedModel, is_sharded, sharded
from hyper_parallel.strategy import Strategy
from hyper_parallel.units import round_up


@dataclass(frozen=True)
class Replica:
    """The replica of this process, the `index`-th of `count`."""

    index: int = 0
    count: int = 1
    leads: bool = True
    """Whether this is its first rank, which chooses tokens and reports answers."""
    group: Any = None
    """The process group of its ranks; None where it has one."""

    @classmethod
    def of(cls, model: nn.Module, context: int = 1) -> Replica:
        """The replica of this rank, of a model whose weights are replicated over `context` ranks of each replica, too.
        A collective of all ranks of a parallelized one."""
        if not is_sharded(model) or sharded(model).mesh.world == 1:
            return cls()
        handle = sharded(model)
        ranks: dict[int, list[int]] = {}
        for rank in handle.axes.devices.ranks:
            index = handle.axes.devices.coordinate(rank)["replicate"] // context
            ranks.setdefault(index, []).append(rank)
        found = cls()
        for index, members in sorted(ranks.items()):
            # Every rank takes part in making every group.
            group = dist.new_group(members) if len(members) > 1 else None
            if handle.rank in members:
                found = cls(index, len(ranks), handle.rank == members[0], group)
        return found


# Context parallelism of generation: the ranks that share the tokens of a pass and the pages of its requests.
#
# The context of a request is cut into groups of c pages; rank r of c holds the r-th:
#
#     token t is on rank (t mod c·p) ÷ p, in row (t ÷ c·p) · p + t mod p of the request's pages    (p: tokens of a page)
#
# so that a page table has one entry a group, the same on every rank, and each rank stores 1/c of the keys and values.
# The rank that holds a token's page also computes the token. The model's weights are on every rank: for them `context`
# is an axis along which they are replicated.


@dataclass(frozen=True)
class Piece:
    """Tokens of one request that one rank computes: rows `start` onwards of the rank's row, positions `first` onwards.
    `segment` is the index of the request's segment in the pass."""

    segment: int
    start: int
    count: int
    first: int

    @property
    def end(self) -> int:
        """The position behind them."""
        return self.first + self.count


@dataclass(frozen=True)
class ContextGroup:
    """Rank `rank` of `size` ranks; `group` names their process group."""

    rank: int
    size: int
    page: int
    """Tokens of a page."""
    group: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a group of pages."""
        return self.size * self.page

    def local(self, end: int) -> int:
        """How many of the first `end` tokens of a request are in this rank's pages."""
        groups, rest = divmod(end, self.tokens)
        return groups * self.page + min(max(rest - self.rank * self.page, 0), self.page)

    def pieces(self, segments: Sequence[Segment]) -> list[list[Piece]]:
        """The pieces of a pass's segments that each rank computes."""
        found: list[list[Piece]] = [[] for _ in range(self.size)]
        starts = [0] * self.size
        for index, segment in enumerate(segments):
            first = segment.first
            while first < segment.end:
                rank = first % self.tokens // self.page
                count = min(self.page - first % self.page, segment.end - first)
                found[rank].append(Piece(index, starts[rank], count, first))
                starts[rank] += count
                first += count
        return found

    def length(self, pieces: Sequence[Sequence[Piece]]) -> int:
        """Rows of the pass, the same on every rank: those of the rank that has most, filled up."""
        return max(WIDE, *(round_up(sum(piece.count for piece in part), WIDE) for part in pieces))


def without_context(strategy: Strategy) -> Strategy:
    """The strategy of the model: `context` is the inner part of `replicate`. Raises StrategyError for what does not go
    together with context."""
    axes = strategy.axes
    if axes.context == 1:
        return strategy
    if strategy.placement.placed:
        raise StrategyError(
            "axes.context of generation has no place in 'placement' yet; leave one of them out"
        )
    if axes.shard * axes.tensor % axes.expert:
        raise StrategyError(
            f"axes.expert ({axes.expert}) must divide shard · tensor ({axes.shard * axes.tensor}): generation does not "
            "spread experts over context"
        )
    other = {"context": "replicate", "replicate": "context"}
    order = tuple(other.get(axis, axis) for axis in axes.order)
    degrees = {"replicate": axes.replicate * axes.context, "context": 1, "order": order}
    return strategy.model_copy(update={"axes": axes.model_copy(update=degrees)})


def context_group(handle: ShardedModel, size: int, page: int) -> ContextGroup:
    """This rank's group of `size`, of a model that is replicated along `context`. A collective of all ranks."""
    members: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in handle.axes.devices.ranks:
        place = dict(handle.axes.devices.coordinate(rank))
        place["replicate"] //= size
        members.setdefault(tuple(sorted(place.items())), []).append(rank)
    found = ContextGroup(0, 1, page)
    for _, ranks in sorted(members.items()):
        ranks.sort(key=lambda rank: handle.axes.devices.coordinate(rank)["replicate"])
        group = dist.new_group(ranks)
        if handle.rank in ranks:
            # Ranks of a process group ascend, and so do those along an axis.
            found = ContextGroup(ranks.index(handle.rank), size, page, str(group.group_name))
    return found


class Agreement:
    """Between the ranks of a process group; of one process alone without one."""

    def __init__(self, group: Any = None, device: torch.device | None = None) -> None:
        """`device`: where the group's collectives take their tensors."""
        self._group, self._device = group, device

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self._group is None

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Each number, as large as on any rank. A collective."""
        if self._group is None or not numbers:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return [int(one) for one in found.tolist()]

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """Each number, as small as on any rank. A collective."""
        return [-one for one in self.largest([-one for one in numbers])]
