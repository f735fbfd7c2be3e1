"""Ranks that are threads of one process: their collectives are those of processes, and none waits for ever."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.compat import collectives, thread_ranks
from hyper_parallel.compat.thread_ranks import ThreadRanks
from hyper_parallel.errors import FollowsError, HyperParallelError

PAIRS = ([0, 2], [1, 3])


def _prepared() -> tuple[ThreadRanks, list[str]]:
    ranks, names = ThreadRanks(4), []
    for rank in range(4):
        with ranks.preparing(rank):
            mine = next(pair for pair in PAIRS if rank in pair)
            group = dist.new_group(mine, use_local_synchronization=True)
            assert group is not None
            names.append(str(group.group_name))
            told = [f"from {rank}"]
            dist.broadcast_object_list(told, src=0)
            assert told == ["from 0"]
    return ranks, names


def _collectives(rank: int, name: str) -> list[Tensor]:
    mine = torch.arange(4.0).view(4, 1) + 10 * rank
    place = next(one for one in PAIRS if rank in one).index(rank)
    send = [1, 3] if place == 0 else [2, 2]
    receive = [1, 2] if place == 0 else [3, 2]
    return [
        collectives.all_reduce(mine, name),
        collectives.all_reduce(mine, name, "max"),
        collectives.all_gather(mine, name, 2),
        collectives.reduce_scatter(mine, name, 2),
        collectives.all_to_all(mine, send, receive, name),
        *collectives.all_gather_coalesced([mine, mine + 1], name, 2),
    ]


def test_collectives_are_those_of_their_groups() -> None:
    ranks, names = _prepared()
    found = ranks.run(lambda rank: _collectives(rank, names[rank]))
    for one, other in PAIRS:
        a, b = (torch.arange(4.0).view(4, 1) + 10 * rank for rank in (one, other))
        total, whole = a + b, torch.cat([a, b])
        for place, rank in enumerate((one, other)):
            got = found[rank]
            assert torch.equal(got[0], total) and torch.equal(got[1], b)
            assert torch.equal(got[2], whole) and torch.equal(got[3], total[2 * place : 2 * place + 2])
            parts = [torch.cat([a[:1], b[:2]]), torch.cat([a[1:], b[2:]])]
            assert torch.equal(got[4], parts[place])
            assert torch.equal(got[5], whole) and torch.equal(got[6], whole + 1)


def test_functions_of_torch_distributed_answer_for_the_threads_rank() -> None:
    ranks, _ = _prepared()

    def part(rank: int) -> tuple[int, list[int], float]:
        everyone = [0] * dist.get_world_size()
        dist.all_gather_object(everyone, dist.get_rank() ** 2)
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return dist.get_rank(), everyone, float(total)

    assert ranks.run(part) == [(rank, [0, 1, 4, 9], 6.0) for rank in range(4)]
    assert not dist.is_initialized()


def test_the_error_of_the_rank_that_failed_is_raised_and_the_others_end() -> None:
    ranks, names = _prepared()

    def part(rank: int) -> None:
        if rank == 2:
            raise ValueError("lost")
        _collectives(rank, names[rank])

    with pytest.raises(ValueError, match="lost"):
        ranks.run(part)


def test_ranks_that_come_to_different_collectives_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, names = _prepared()

    def part(rank: int) -> None:
        one = torch.ones(2)
        if rank == 0:
            collectives.all_gather(one, names[rank], 2)
        elif rank == 2:
            collectives.all_reduce(one, names[rank])

    with pytest.raises(HyperParallelError, match="come to all_gather_into_tensor, all_reduce at once"):
        ranks.run(part)
    monkeypatch.setattr(thread_ranks, "LIMIT_S", 0.2)
    ranks, names = _prepared()
    with pytest.raises(FollowsError, match=r"ranks \[3\] did not come within"):
        ranks.run(lambda rank: collectives.all_reduce(torch.ones(1), names[rank]) if rank != 3 else None)
