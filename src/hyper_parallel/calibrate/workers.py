"""Worker processes that measure, alone or several at once, as in a run."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

from hyper_parallel.calibrate.timing import Job, Results
from hyper_parallel.errors import LaunchError

Progress = Callable[[str], None]


def run(job: Job, progress: Progress, timeout_s: float = 600.0) -> list[Results]:
    """Start `job.world` workers and return what each measured. Raises LaunchError when one fails."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["hyper_parallel.calibrate.measure"])
    with tempfile.TemporaryDirectory(prefix="calibrate-") as meeting:
        ends, processes = [], []
        try:
            for rank in range(job.world):
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_main, args=(job, rank, meeting, there), daemon=True)
                process.start()
                there.close()
                ends.append(here)
                processes.append(process)
            found = _hear(ends, progress, time.monotonic() + timeout_s)
            for process in processes:
                process.join(10)
            return found
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()


def _hear(ends: list[Connection], progress: Progress, deadline: float) -> list[Results]:
    found: dict[int, Results] = {}
    open_ends = {end: rank for rank, end in enumerate(ends)}
    while open_ends:
        ready = wait(list(open_ends), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise LaunchError("the workers that measure took too long; is the machine busy? try --quick")
        for end in ready:
            assert isinstance(end, Connection), "only pipes are waited for"
            rank = open_ends[end]
            try:
                kind, value = end.recv()
            except EOFError:
                raise LaunchError(
                    f"worker {rank} of {len(ends)} died while measuring; was there memory for {len(ends)} workers? "
                    "try --workers 1"
                ) from None
            if kind == "progress" and rank == 0:
                progress(value)
            elif kind == "failed":
                raise LaunchError(f"worker {rank} of {len(ends)} failed while measuring: {value}")
            elif kind == "done":
                found[rank] = value
                del open_ends[end]
    return [found[rank] for rank in range(len(ends))]


def _main(job: Job, rank: int, meeting: str, end: Connection) -> None:
    """A worker."""
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    import torch
    import torch.distributed as dist

    from hyper_parallel import compat
    from hyper_parallel.calibrate.measure import measure

    try:
        torch.set_num_threads(job.threads)
        torch.manual_seed(rank)
        backend = compat.backend(job.device, workers=job.world)
        device = backend.device(rank)
        backend.set_device(device)
        if job.world > 1:
            store = dist.FileStore(  # type: ignore[attr-defined]
                str(Path(meeting) / "store"), job.world
            )
            dist.init_process_group(
                backend.process_group,
                store=store,
                rank=rank,
                world_size=job.world,
                timeout=timedelta(minutes=5),
            )
        results = measure(job, backend, device, lambda line: end.send(("progress", line)))
        if job.world > 1:
            dist.barrier()
            dist.destroy_process_group()
        end.send(("done", results))
    except Exception as error:
        traceback.print_exc()
        end.send(("failed", f"{type(error).__name__}: {error}"))
