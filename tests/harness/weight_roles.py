"""`run_roles`: two groups of processes, each with a default process group of its own, and the address of a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from harness.ranks import RanksError, run_ranks
from hyper_parallel.compat.process_groups import serve_store


def run_roles(
    actor: Callable[..., Any],
    actors: int,
    rollout: Callable[..., Any],
    rollouts: int,
    *args: Any,
    timeout: float = 60.0,
) -> tuple[list[Any] | RanksError, list[Any] | RanksError]:
    """Run ``actor(rank, world, port, *args)`` on `actors` processes and `rollout` on `rollouts`, at the same time.

    `port`: of a store on 127.0.0.1, which this process serves. Each group's results in order of rank, or how it failed.
    """
    served = serve_store("127.0.0.1")
    outcome: dict[str, list[Any] | RanksError] = {}

    def run(name: str, function: Callable[..., Any], world: int) -> None:
        try:
            outcome[name] = run_ranks(function, world, served.port, *args, timeout=timeout)
        except RanksError as error:
            outcome[name] = error

    threads = [
        threading.Thread(target=run, args=("actor", actor, actors)),
        threading.Thread(target=run, args=("rollout", rollout, rollouts)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome["actor"], outcome["rollout"]
