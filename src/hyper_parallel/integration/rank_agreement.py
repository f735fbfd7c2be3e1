"""Agreement between the ranks of another trainer's run, over whatever process group it made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from hyper_parallel.checkpoint import Ranks
from hyper_parallel.checkpoint.durable import explain
from hyper_parallel.checkpoint.rank_agreement import Alone, agree
from hyper_parallel.errors import CheckpointError
from hyper_parallel.shard import ShardedModel


class Everyone:
    """All ranks of the default group, which may carry tensors of an accelerator only (Accelerate's NCCL)."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def gather(self, text: str) -> list[str]:
        """The text of every rank, in rank order."""
        found: list[str] = [""] * self.world
        dist.all_gather_object(found, text)
        return found


def ranks_of(handle: ShardedModel) -> Ranks:
    """The ranks that a model is spread over, as this one sees them."""
    return Everyone() if handle.world > 1 else Alone()


@contextlib.contextmanager
def together(ranks: Ranks, path: Path, action: str = "write") -> Iterator[None]:
    """What goes wrong inside on one rank is raised on all, so that none waits for it in a collective.

    Raises CheckpointError for what the file system refuses and on the ranks where nothing went wrong; else what was
    raised inside. All ranks call this at the same point, and none communicates inside.
    """
    try:
        yield
    except OSError as problem:
        agree(ranks, explain(problem, path, action))
    except CheckpointError as problem:
        agree(ranks, problem)
    except Exception as problem:
        with contextlib.suppress(CheckpointError):
            agree(ranks, CheckpointError(f"{path}: {type(problem).__name__}: {problem}"))
        raise
    else:
        agree(ranks, None)
