"""Selects the one worker that reports errors all workers find before they have met.

What is wrong with a file or a machine is found by every worker of it: the machine's first one says it. The
others wait, because launchers end all workers when the first one ends, and would end the one that speaks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

SETTLE_S = 3.0
"""How long a worker lets another one speak."""

_LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process is the first worker on its machine, or no launcher's worker at all."""
    stated = [environ[key] for key in (*_LOCAL_RANK, *_RANK) if key in environ]
    return not stated or stated[0] == "0"


def let_speak() -> None:
    """Give the worker that speaks the time to do so, and the launcher to end this one."""
    time.sleep(SETTLE_S)
