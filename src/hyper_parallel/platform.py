"""`get_platform()` for LlamaFactory's main branch: rank and world size."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """This process among the run's."""

    def get_rank(self) -> int:
        """Its rank: the process group's, before there is one the launcher's; 0 for a process by itself."""
        import torch.distributed as dist

        return dist.get_rank() if _grouped() else int(os.environ.get("RANK", "0"))

    def get_world_size(self) -> int:
        """How many processes the run has: the process group's, before there is one the launcher's, else 1."""
        import torch.distributed as dist

        return dist.get_world_size() if _grouped() else int(os.environ.get("WORLD_SIZE", "1"))


def get_platform() -> Platform:
    """The platform of this process. Takes no part in starting the process group."""
    return Platform()


def _grouped() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
