"""`get_platform()` for LlamaFactory's main branch: rank and world size."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """This process's place in the run."""

    def get_rank(self) -> int:
        """The rank: from the process group, before it exists from the launcher; 0 for a single process."""
        import torch.distributed as dist

        return dist.get_rank() if _grouped() else int(os.environ.get("RANK", "0"))

    def get_world_size(self) -> int:
        """The number of processes: from the process group, before it exists from the launcher, else 1."""
        import torch.distributed as dist

        return dist.get_world_size() if _grouped() else int(os.environ.get("WORLD_SIZE", "1"))


def get_platform() -> Platform:
    """The platform of this process. It does not start the process group."""
    return Platform()


def _grouped() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
