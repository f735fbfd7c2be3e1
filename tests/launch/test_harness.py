"""The harness itself: results by rank, failures with rank and traceback, hangs named."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from harness import RanksError, run_ranks


def _total(rank: int, world: int, offset: int) -> tuple[int, float, torch.Tensor]:
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return rank, total.item(), torch.full((300, 300), float(rank))


def test_ranks_form_a_group_and_results_come_in_order() -> None:
    results = run_ranks(_total, 4, 1)
    assert [rank for rank, _, _ in results] == [0, 1, 2, 3]
    assert all(total == 10.0 for _, total, _ in results)
    assert [tensor.sum().item() for _, _, tensor in results] == [0, 90000, 180000, 270000]


def _one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("the odd one")
    dist.barrier()


def test_a_failure_shows_the_rank_and_the_traceback() -> None:
    with pytest.raises(RanksError, match=r"(?s)rank 1 of 2:.*ValueError: the odd one"):
        run_ranks(_one_raises, 2)


def _one_hangs(rank: int, world: int) -> int:
    if rank == 1:
        time.sleep(600)
    return os.getpid()


def test_a_hang_is_named_and_killed() -> None:
    with pytest.raises(RanksError, match=r"hung: ranks 1 had not returned after 1\.5 s"):
        run_ranks(_one_hangs, 2, timeout=1.5)


def _one_is_killed(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RanksError, match="rank 0 of 2:\nthe process died"):
        run_ranks(_one_is_killed, 2)
