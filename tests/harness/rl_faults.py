"""Kills and stops of workers in the middle of a run of reinforcement learning."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.launch.roles.engine import Group
from hyper_parallel.launch.roles.local import LocalEngine
from hyper_parallel.rl.run import RLSummary, run


class WatchedEngine(LocalEngine):
    """Knows its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Group] = []

    def start(self, config: Any, *, timeout_s: float) -> Any:
        group = super().start(config, timeout_s=timeout_s)
        self.groups.append(group)
        return group


@contextlib.contextmanager
def faults(
    engines: list[WatchedEngine],
    count: int,
    seed: int,
    between_s: tuple[float, float],
    kinds: Sequence[int] = (signal.SIGKILL, signal.SIGSTOP),
    ready: Callable[[], bool] = lambda: True,
    groups: str = "",
) -> Iterator[list[str]]:
    """Inside, so many signals are sent to workers chosen at random, of groups whose names begin with `groups`; what was
    done, in words."""
    draw, done, ends = random.Random(seed), list[str](), threading.Event()

    def work() -> None:
        while len(done) < count and not ends.wait(draw.uniform(*between_s)):
            if not engines or not ready():
                continue
            there = [one for one in engines[-1].groups if one.name.startswith(groups) and one.pids]
            if not there:
                continue
            group = draw.choice(there)
            pid, kind = draw.choice(group.pids), draw.choice(list(kinds))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
                done.append(f"{signal.Signals(kind).name} to {group.name}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        ends.set()
        thread.join(timeout=10)


def faulted(
    config: RLConfig,
    count: int,
    groups: str,
    kinds: Sequence[int],
    between_s: tuple[float, float] = (0.1, 0.6),
) -> tuple[RLSummary, list[str], list[str]]:
    """A run with signals as in `faults`, from its first evaluation on: its summary, what was done, and its lines."""
    engines: list[WatchedEngine] = []

    def engine() -> WatchedEngine:
        engines.append(WatchedEngine())
        return engines[-1]

    lines: list[str] = []
    begun = lambda: any("held out" in line for line in lines)  # noqa: E731
    with faults(engines, count, 1, between_s, kinds, begun, groups) as done:
        return run(config, engine=engine, told=lines.append), done, lines


_KEPT = (b"multiprocessing", b"hyper_parallel.launch.fork_server import main", b'names["serve"]')
"""Of processes that outlive a run on purpose: the fork servers of the tests' ranks, of the library and of its
sandbox."""


def left_behind() -> list[str]:
    """Command lines of the processes that descend from this one; zombies and fork servers left out."""
    time.sleep(0.2)
    parents: dict[int, int] = {}
    lines: dict[int, bytes] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    line = file.read()
                if fields[0] != "Z":
                    parents[int(entry)], lines[int(entry)] = int(fields[1]), line
    own = {pid for pid, parent in parents.items() if parent == os.getpid()}
    servers = {pid for pid in own if any(word in lines[pid] for word in _KEPT)}
    # A worker has the command line of the server that it was forked from, which may be a fork of the tests' server.
    launchers = {pid for pid in servers if _KEPT[1] in lines[pid]}
    launchers.update(child.pid for child in multiprocessing.active_children() if child.pid is not None)
    workers = {pid for pid, parent in parents.items() if parent in launchers}
    return [
        lines[pid].replace(b"\0", b" ").decode(errors="replace")[:200] for pid in (own - servers) | workers
    ]
