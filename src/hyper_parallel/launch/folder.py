"""The run's folder, which is removed again if the run is refused."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from hyper_parallel.errors import LaunchError
from hyper_parallel.launch import run_lock


class RunFolder:
    """`out` as it was before this run."""

    def __init__(self, out: str | Path) -> None:
        self._out = Path(out)
        # Deepest first: `out`, then those of its parents that do not exist either.
        self._missing = [folder for folder in (self._out, *self._out.parents) if not folder.exists()]

    def make(self) -> None:
        """Make it, with the folder for the logs. Raises LaunchError when the system refuses."""
        logs = self._out / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"cannot write to the run's folder {logs}: {error.strerror}; set 'out'"
            ) from error

    def forget(self) -> None:
        """Remove the folder that `make` created if it contains only logs, since the error line has been shown."""
        with contextlib.suppress(OSError):
            ours = ("logs", run_lock.NAME)
            if self._out in self._missing and all(entry.name in ours for entry in self._out.iterdir()):
                shutil.rmtree(self._out)
                for folder in self._missing[1:]:
                    folder.rmdir()
