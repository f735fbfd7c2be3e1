"""Selects the one worker that reports errors which all workers find before rendezvous.

Every worker of a machine finds the same problem with a file or the machine; the machine's first worker reports it. The
others wait, because launchers end all workers when the first one ends, and could end the reporting one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from hyper_parallel.launch.torchelastic_report import leave_quietly

SETTLE_S = 3.0
"""Seconds that a worker waits for the reporting one."""

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
    """Wait for the reporting worker, or until the launcher ends this one."""
    leave_quietly()
    time.sleep(SETTLE_S)
