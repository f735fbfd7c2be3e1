"""Rank agreement of a save: short texts gathered on the main thread, never concurrent with training's collectives."""

from __future__ import annotations

import json
from typing import Protocol, runtime_checkable

import torch.distributed as dist

from hyper_parallel.compat.process_groups import gather_objects
from hyper_parallel.errors import CheckpointError


@runtime_checkable
class Ranks(Protocol):
    """The ranks that save or verify together, seen from one of them."""

    rank: int
    world: int

    def gather(self, text: str) -> list[str]:
        """The text of every rank, in rank order; every rank calls this at the same point."""
        ...


class Alone:
    """A single process."""

    rank = 0
    world = 1

    def gather(self, text: str) -> list[str]:
        """The text itself."""
        return [text]


class RankAgreement:
    """A torch process group, by default that of all ranks; it may carry tensors of an accelerator only (NCCL)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def gather(self, text: str) -> list[str]:
        """The text of every rank, in rank order."""
        return gather_objects(text, self._group)


def ranks_of(group: dist.ProcessGroup | Ranks | None, world: int, rank: int) -> Ranks:
    """The ranks to agree with: those of `group`, or of the default group if `world` is above one.

    Raises CheckpointError if the group is missing or has another size.
    """
    if group is None and world == 1:
        return Alone()
    if group is None:
        if not dist.is_initialized():
            raise CheckpointError(
                f"a run of {world} ranks needs a process group to save with; call "
                "torch.distributed.init_process_group first, or pass group="
            )
        group = dist.group.WORLD
        assert group is not None
    ranks = group if isinstance(group, Ranks) else RankAgreement(group)
    if (ranks.rank, ranks.world) != (rank, world):
        raise CheckpointError(
            f"this is rank {ranks.rank} of {ranks.world} in the process group, but rank {rank} of {world} in "
            "the run; pass the group of all ranks of the run, in their order"
        )
    return ranks


def agree(ranks: Ranks, error: CheckpointError | None, note: str = "") -> str:
    """Rank 0's `note` if no rank has an error; otherwise every rank raises the first rank's error."""
    gathered = [json.loads(text) for text in ranks.gather(json.dumps([str(error) if error else None, note]))]
    for rank, (message, _) in enumerate(gathered):
        if message is not None:
            raise CheckpointError(message if ranks.world == 1 else f"rank {rank}: {message}") from error
    return str(gathered[0][1])
