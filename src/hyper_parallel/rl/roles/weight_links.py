"""The weight transfers of one worker: those that its actor sends, and the one that its rollout receives."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.compat.standalone_group import ServedStore, serve_store
from hyper_parallel.rl.weights.description import Description
from hyper_parallel.rl.weights.local_parameters import local_tensors
from hyper_parallel.rl.weights.meeting import Meeting
from hyper_parallel.rl.weights.options import TransferOptions
from hyper_parallel.rl.weights.plan import plan_weights
from hyper_parallel.rl.weights.transfer import WeightTransfer, connect


class WeightLinks:
    """By the name of the group at the other end."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._links: dict[str, WeightTransfer] = {}
        self._store: ServedStore | None = None

    def __getitem__(self, link: str) -> WeightTransfer:
        return self._links[link]

    def serve(self, host: str) -> tuple[str, int]:
        """The address at which roles meet, served by this process until it ends."""
        if self._store is None:
            self._store = serve_store(host)
        return self._store.host, self._store.port

    def connect(
        self,
        link: str,
        source: dict[str, Any],
        target: dict[str, Any],
        meeting: dict[str, Any],
        options: dict[str, Any],
        *,
        gives: nn.Module | None,
        takes: nn.Module | None,
        seconds: float,
    ) -> None:
        """Meet the other ranks. `gives`, `takes`: this worker's model in the role of the source and of the target."""
        self.close(link)
        plan = plan_weights(
            Description.from_json(source),
            Description.from_json(target),
            TransferOptions(**options),
            colocated=gives is not None and takes is not None,
        )
        rank = plan.source_rank(self._rank) if gives is not None else plan.target_rank(self._rank)
        self._links[link] = connect(
            plan,
            rank,
            Meeting(**meeting),
            source=(lambda: local_tensors(gives)) if gives is not None else None,
            target=(lambda: local_tensors(takes)) if takes is not None else None,
            seconds=seconds,
        )

    def close(self, link: str) -> None:
        """End a link, if it is there."""
        if (found := self._links.pop(link, None)) is not None:
            found.close()
