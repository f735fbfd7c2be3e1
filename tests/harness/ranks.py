"""`run_ranks`: a module-level function on `world` processes in one gloo group."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from harness.fork_server import end_with_server, fork_context, server_pid

GRACE_S = 3.0
"""How long the other ranks may go on after one failed, so that the report shows what each of them saw."""


class RanksError(AssertionError):
    """A rank raised, died or hung; the text has each failing rank's traceback."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `function(rank, world, *args)` on `world` processes and return the results in order of rank.

    `function` is defined at the top of a test module; arguments and results are pickled. Each rank has a
    gloo process group over loopback (`torch.distributed` is initialised) and computes with one thread.

    Raises RanksError when a rank raises, dies, or has not returned after `timeout` seconds (all are killed).
    """
    context = fork_context()
    call = pickle.dumps((function, args))
    pipes = [context.Pipe() for _ in range(world)]
    # Bound here and handed to rank 0, so that no other process can take the port in between.
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        processes = [
            context.Process(
                target=_rank_main,
                args=(
                    call,
                    rank,
                    world,
                    theirs,
                    listener if rank == 0 else None,
                    port,
                    timeout,
                    server_pid(),
                ),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()
            return _collect([ours for ours, _ in pipes], function.__qualname__, timeout)
        finally:
            # Every result is here already, or the run failed: nothing in a rank is worth waiting for.
            for process, (ours, _) in zip(processes, pipes, strict=True):
                ours.close()
                if process.pid is not None:
                    process.kill()
                    process.join()


def _collect(connections: list[Connection], name: str, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    ranks = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + timeout
    while ranks:
        ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = ranks.pop(connection)
            try:
                failed, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                failed, value = True, "the process died without a word (a signal, or os._exit)"
            if failed:
                failures.append(f"rank {rank} of {len(connections)}:\n{value}")
                deadline = min(deadline, time.monotonic() + GRACE_S)
            else:
                results[rank] = value
    if ranks:
        unfinished = ", ".join(str(rank) for rank in sorted(ranks.values()))
        failures.append(
            f"killed when they had not returned {GRACE_S:g} s after the first failure: ranks {unfinished}"
            if failures
            else f"hung: ranks {unfinished} had not returned after {timeout:g} s"
        )
    if failures:
        raise RanksError(f"{name} on {len(connections)} ranks\n" + "\n".join(failures))
    return [results[rank] for rank in range(len(connections))]


def _rank_main(
    call: bytes,
    rank: int,
    world: int,
    connection: Connection,
    listener: socket.socket | None,
    port: int,
    timeout: float,
    server: int,
) -> None:
    end_with_server(server)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then kills the ranks
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            world,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach() if listener is not None else None,
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        function, args = pickle.loads(call)
        # Plain pickle: torch's own reducers would hand over memory that ends with this process.
        answer = pickle.dumps((False, function(rank, world, *args)))
        failed = False
    except BaseException:
        answer = pickle.dumps((True, traceback.format_exc()))
        failed = True
    try:
        connection.send_bytes(answer)
        if not failed:  # a failed rank leaves at once: its peers' collectives then fail instead of hanging
            connection.recv_bytes()  # until the parent has every result: rank 0 holds the store
    except (EOFError, OSError):
        pass
    os._exit(0)  # the group's threads may be stuck in a collective that will never complete
