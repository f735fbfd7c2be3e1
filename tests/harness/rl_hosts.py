"""Hosts of roles whose workers die, for tests."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hyper_parallel.rl.roles.host import RoleHost
from hyper_parallel.rl.sample import Sample


class DiesApart(RoleHost):
    """Its workers have no memory for updates, as it were, where others generate."""

    def train(self, samples: Sequence[Sample], reference: list[list[float]] | None) -> dict[str, float]:
        if self._rollout is None:
            os._exit(9)
        return super().train(samples, reference)
