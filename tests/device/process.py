"""`in_fresh_processes`: a module-level function in interpreters that have no device yet.

PyTorch takes one device of a program's own, before its autograd has begun, and once: a fork of a process that has
trained cannot have it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def in_fresh_processes(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 300.0
) -> list[Any]:
    """The results of `function(rank, world, *args)`, by rank. Raises AssertionError with what a process said that
    failed, or has not returned in time."""
    paths = [str(TESTS), str(TESTS.parent / "src"), str(TESTS.parent / "benchmarks")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        said = [open(folder / f"said {rank}", "w+") for rank in range(world)]  # noqa: SIM115
        processes = [
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "device.process", name, str(rank), str(world)],
                env=environment,
                stdout=said[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(world)
        ]
        until = time.monotonic() + timeout
        try:
            # One that fails leaves others waiting.
            while any(one.poll() is None for one in processes) and time.monotonic() < until:
                if any(one.poll() for one in processes):
                    break
                time.sleep(0.02)
        finally:
            for one in processes:
                if one.poll() is None:
                    one.kill()
                    one.wait()
        results = []
        for rank, one in enumerate(processes):
            said[rank].seek(0)
            text = said[rank].read()
            said[rank].close()
            assert one.returncode == 0, f"rank {rank} of {world} ended with {one.returncode}:\n{text[-6000:]}"
            results.append(pickle.loads((folder / f"result {rank}").read_bytes()))
        return results


def _main(name: str, rank: str, world: str) -> None:
    import importlib

    module, function, args = pickle.loads((Path(name) / "call").read_bytes())
    result = getattr(importlib.import_module(module), function)(int(rank), int(world), *args)
    (Path(name) / f"result {rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
