"""Processor time of a process and of all its descendants, reaped or alive, as Linux counts it.

A child's time moves into its parent's account when the parent reaps it, so that the sum over the tree only grows. The
time of fork-server workers is in the account of their server, which is a descendant, too.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def tree_seconds() -> float:
    """User and system seconds of this process, its reaped children, and all living descendants with theirs."""
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds + sum(_account(pid) for pid in descendants(os.getpid()))


def descendants(pid: int) -> list[int]:
    """The living processes below `pid`, those of every thread of it."""
    below = []
    for child in _children(pid):
        below += [child, *descendants(child)]
    return below


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    except OSError:  # the process or one of its threads has ended
        pass
    return children


def _account(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # Fields 14 to 17 of proc(5): utime, stime, cutime, cstime; `fields` begins with the third.
    return sum(map(int, fields[11:15])) / TICKS
