"""Run a Program's transfers on gloo: one thread and one gloo process group for each device group, in one process.

gloo's sends are rendezvous, and transfers with one tag between two ranks are first in, first out in each direction:
what a Program is verified for. Values are two integers that name the port and the micro-batch, checked on arrival.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from hyper_parallel.program import Program, Recv, Run, RunPair, Send, Wait

TRANSFER = 0


class GlooGroups:
    """Process groups of `size` ranks in this process, used by one thread each."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        store = dist.HashStore()
        limit = timedelta(seconds=timeout_s)
        made: dict[int, dist.ProcessGroupGloo] = {}

        def make(rank: int) -> None:
            made[rank] = dist.ProcessGroupGloo(dist.PrefixStore("programs", store), rank, size, limit)

        _together(make, size)
        self.ranks = [made[rank] for rank in range(size)]


def run_on_gloo(program: Program, groups: GlooGroups, rendezvous: bool = True) -> list[str]:
    """Errors of a run: time-outs and wrong values, by group; empty when every group got to its end.

    `rendezvous`: a Send waits until it is received. Otherwise its Wait does, or the end of the list.
    """
    names = list(program.instructions)
    ports = {name: index for index, name in enumerate(program.ports)}
    errors: list[str] = []

    def run(rank: int) -> None:
        try:
            _interpret(program, names, rank, groups.ranks[rank], ports, rendezvous)
        except Exception as error:
            errors.append(f"{names[rank]}: {error}")

    _together(run, len(names))
    return errors


def _interpret(
    program: Program,
    names: list[str],
    rank: int,
    group: dist.ProcessGroupGloo,
    ports: dict[str, int],
    rendezvous: bool,
) -> None:
    me = names[rank]
    receives: dict[tuple[str, int], tuple[torch.Tensor, dist.Work]] = {}
    sends: dict[tuple[str, int, str], tuple[torch.Tensor, dist.Work]] = {}

    def value(port: str, micro_batch: int) -> torch.Tensor:
        return torch.tensor([ports[port], micro_batch])

    for one in program.instructions[me]:
        if isinstance(one, Run | RunPair):
            continue
        if isinstance(one, Send):
            tensor = value(one.port, one.micro_batch)
            work = group.send([tensor], names.index(one.to), TRANSFER)
            if rendezvous:
                work.wait()
            else:
                sends[one.port, one.micro_batch, one.to] = tensor, work
        elif isinstance(one, Recv):
            tensor = torch.full((2,), -2)
            work = group.recv([tensor], names.index(one.source), TRANSFER)
            receives[one.port, one.micro_batch] = tensor, work
        elif isinstance(one, Wait):
            if program.ports[one.port].group == me:
                if not rendezvous:
                    sends.pop((one.port, one.micro_batch, one.peer))[1].wait()
                continue
            tensor, work = receives[one.port, one.micro_batch]
            work.wait()
            if not torch.equal(tensor, value(one.port, one.micro_batch)):
                raise ValueError(f"{one} got {tensor.tolist()}")
    for _, work in sends.values():
        work.wait()


def _together(function, count: int) -> None:
    threads = [threading.Thread(target=function, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
