"""Process groups that are made from a store, beside and without the default group."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from hyper_parallel.compat.process_groups import PeerError, StandaloneGroup, serve_store


def _turned_around(rank: int, world: int, port: int) -> list[int]:
    dist.destroy_process_group()
    group = StandaloneGroup.connect("127.0.0.1", port, "first", rank=rank, world=world, seconds=20)
    received = torch.zeros(3, dtype=torch.uint8)
    coming = group.receive(received, (rank - 1) % world)
    going = group.send(torch.full((3,), rank, dtype=torch.uint8), (rank + 1) % world)
    assert group.wait(coming, 20) is received
    group.wait(going, 20)
    return received.tolist()


def test_ranks_meet_without_a_default_group() -> None:
    served = serve_store("127.0.0.1")
    assert run_ranks(_turned_around, 3, served.port) == [[2] * 3, [0] * 3, [1] * 3]


def _closes(rank: int, world: int, port: int) -> str:
    group = StandaloneGroup.connect("127.0.0.1", port, "first", rank=rank, world=world, seconds=20)
    if rank == 1:
        pending = group.receive(torch.zeros(1, dtype=torch.uint8), 0)
        group.close()
        with pytest.raises(PeerError, match="the group is closed"):
            group.wait(pending, 1)
        time.sleep(1)  # only the close is seen, not the end of this process
        return ""
    with pytest.raises(PeerError) as error:  # the other end may be closed before this one has begun
        group.wait(group.receive(torch.zeros(1, dtype=torch.uint8), 1), 20)
    return str(error.value)


def test_a_closed_end_is_noticed_at_once() -> None:
    served = serve_store("127.0.0.1")
    noticed, _ = run_ranks(_closes, 2, served.port)
    # The system says one or the other, by what was on its way.
    assert "Connection closed by peer" in noticed or "Connection reset by peer" in noticed
    assert "\n" not in noticed


def test_nobody_serves_the_address() -> None:
    with pytest.raises(PeerError, match=r"have not met within 0\.5 s"):
        StandaloneGroup.connect("127.0.0.1", 1, "first", rank=0, world=2, seconds=0.5)
