"""Blocks of steps of two systems in turn, on all ranks, with what other processes computed meanwhile."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from measure import timed
from torch import Tensor

FEWEST = 8
"""Blocks, whatever time they take."""


class System(Protocol):
    """One of the two runtimes, with its stages of this rank."""

    def step(self) -> None:
        """All micro-batches forward and back; the gradients of the step before are dropped first."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Of the last step, by the names of the parameters."""

    def loss(self) -> float | None:
        """Of the last step; None where another rank computes it."""


@dataclass(frozen=True)
class Effort:
    """How long a schedule is measured."""

    blocks: int
    """At most; 0 counts allocations instead."""
    seconds: float
    """After which no block begins, once there are a few."""
    patience: float
    """Seconds to wait for idle cores before each block."""


@dataclass(frozen=True)
class Block:
    """What a block came to."""

    ours: float
    """Seconds of a step: the mean of two."""
    theirs: float
    others: float
    """Cores that other processes kept busy meanwhile."""


def busy_seconds() -> float:
    """What all cores have computed since the machine was started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience: float, share: float = 0.1, look: float = 0.2) -> None:
    """Wait until other processes leave the cores alone, `patience` seconds at most."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        before = busy_seconds()
        time.sleep(look)
        if busy_seconds() - before < share * look * (os.cpu_count() or 1):
            return


def measured(ours: System, theirs: System, rank: int, world: int, effort: Effort, seed: int) -> list[Block]:
    """Blocks of four steps in either order of ABBA, drawn at random, the same on all ranks."""
    draw = random.Random(seed)
    found: list[Block] = []
    until = time.monotonic() + effort.seconds
    for _ in range(effort.blocks):
        first = draw.random() < 0.5
        spent = {True: 0.0, False: 0.0}
        over = torch.tensor(len(found) >= FEWEST and time.monotonic() > until)
        dist.broadcast(over, 0)
        if over:
            break
        if rank == 0:
            wait_for_quiet(effort.patience)
        dist.barrier()
        own, all_cores, begun = time.process_time(), busy_seconds(), time.perf_counter()
        for mine in (first, not first, not first, first):
            spent[mine] += timed((ours if mine else theirs).step, world)
        together = torch.tensor(time.process_time() - own)
        dist.all_reduce(together)
        others = busy_seconds() - all_cores - float(together)
        seconds = time.perf_counter() - begun
        found.append(Block(spent[True] / 2, spent[False] / 2, max(0.0, others) / seconds))
    return found
