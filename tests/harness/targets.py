"""What the workers of launch tests run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import DataError, FollowsError
from hyper_parallel.launch import Worker, logs, request_stop, stop, stop_requested

log = logging.getLogger("hyper_parallel.test")


def note(config: RunConfig, rank: int, **facts: object) -> None:
    """Leave facts for the test, whole or not at all."""
    path = Path(config.out) / f"rank-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), **facts}))
    path.with_suffix(".part").rename(path)


def facts(config: RunConfig, worker: Worker) -> None:
    """Sum the ranks, and note what a worker is given."""
    total = torch.tensor(worker.rank)
    dist.all_reduce(total)
    listening = _listening_addresses()
    dist.barrier()  # nobody leaves while others look at the sockets
    note(
        config,
        worker.rank,
        total=int(total),
        world=worker.world,
        local_rank=worker.local_rank,
        local_world=worker.local_world,
        device=str(worker.device),
        backend=worker.backend.name,
        threads=torch.get_num_threads(),
        omp=os.environ["OMP_NUM_THREADS"],
        folder=os.getcwd(),
        listening=listening,
        interface=os.environ.get("GLOO_SOCKET_IFNAME"),
    )


def talk(config: RunConfig, worker: Worker) -> None:
    """Write by every way there is."""
    print(f"printed by {worker.rank}")
    os.write(2, f"native noise of {worker.rank}\n".encode())
    warnings.warn(f"warned by {worker.rank}", stacklevel=1)
    with logs.at(7, micro=2):
        log.info("informed by %d", worker.rank)
        log.warning("alarmed by %d", worker.rank)
    logging.getLogger("torch.distributed").warning("torch is noisy")


def wrong_data(config: RunConfig, worker: Worker) -> None:
    """A user's error, the same on every rank."""
    raise DataError("corpus.txt is empty;\ngive a file with text")


def one_follows(config: RunConfig, worker: Worker) -> None:
    """Rank 1 says first that another rank failed; rank 0 says a second later how."""
    if worker.rank == 1:
        raise FollowsError("another rank failed")
    time.sleep(1)
    raise DataError("the cause")


def cannot_log(config: RunConfig, worker: Worker) -> None:
    """The log can take nothing more, and neither can the file of a library's thread."""
    log.info("the last record")
    size = logs.path_of(config.out, worker.rank).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    log.info("one too many")
    thread = threading.Thread(target=log_path_grows, args=(logs.path_of(config.out, worker.rank),))
    thread.start()
    thread.join()
    raise DataError("the disk is full")


def log_path_grows(path: Path) -> None:
    """Raises OSError where files may not grow."""
    with path.open("a", buffering=1) as file:
        file.write("more\n")


def one_raises(config: RunConfig, worker: Worker) -> None:
    """Rank 1 has a defect; the others notice by their collective."""
    if worker.rank == 1:
        raise ValueError("the defect")
    dist.barrier()


def exits(config: RunConfig, worker: Worker) -> None:
    """Rank 0 leaves without a word."""
    if worker.rank == 0:
        os._exit(7)
    dist.barrier()


def segfaults(config: RunConfig, worker: Worker) -> None:
    """The last rank dies of SIGSEGV."""
    if worker.rank == worker.world - 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def loops(config: RunConfig, worker: Worker) -> None:
    """Steps until asked to stop; notes that it was, after which steps it was asked to save, and that it could still
    talk to the others."""
    saves: list[int] = []
    note(config, worker.rank, stopped=False, saves=saves)
    for step in range(10_000):
        asked = torch.tensor(list(map(int, stop.requests())))
        dist.all_reduce(asked)
        if asked[1]:
            stop.save_served()
            saves.append(step)
            note(config, worker.rank, stopped=False, saves=saves)
        if asked[0]:
            request_stop()
            note(config, worker.rank, stopped=True, step=step, saves=saves)
            return
        time.sleep(0.02)


def prepares(config: RunConfig, worker: Worker) -> None:
    """Is at work on what nothing would be lost of."""
    with stop.interruptible():
        note(config, worker.rank)
        time.sleep(600)


def prepares_deafly(config: RunConfig, worker: Worker) -> None:
    """As `prepares`, but no rank leaves when it is interrupted: one waits in a collective, one goes on."""
    with stop.interruptible():
        note(config, worker.rank)
        while worker.rank == 1:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(600)
        dist.barrier()


def waits_natively(config: RunConfig, worker: Worker) -> None:
    """Rank 0 waits in a collective, where no Python runs, for a rank that comes once rank 0 was asked to stop."""
    note(config, worker.rank)
    if worker.rank == 0:
        dist.barrier()
    else:
        while not stop_requested():
            time.sleep(0.02)
        dist.barrier()
    note(config, worker.rank, stopped=stop_requested())


def draws(config: RunConfig, worker: Worker) -> None:
    """Rank 0 has hidden the cursor and left a line unfinished; then nothing."""
    print("\x1b[?25lstep 1/2", end="", flush=True)
    note(config, worker.rank)
    time.sleep(600)


def ignores_stop(config: RunConfig, worker: Worker) -> None:
    """Never looks at the request to stop."""
    note(config, worker.rank)
    time.sleep(600)


def sees_main(config: RunConfig, worker: Worker) -> None:
    """Note what a worker inherits of the process."""
    note(config, worker.rank, path=sys.path, home=os.environ.get("HYPER_PARALLEL_TEST"))


def _listening_addresses() -> list[str]:
    """The addresses on which this process's own sockets listen, as /proc writes them (hexadecimal)."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = os.readlink(entry)
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def one_is_late(config: RunConfig, worker: Worker) -> None:
    """Rank 1 does not come to the collective while the others' time runs out."""
    if worker.rank == 1:
        time.sleep(600)
    dist.barrier()
