"""Several processes share one pool: what they hold together never exceeds it, and what a dead one held comes back."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import signal
import stat
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from hyper_parallel.compat import backend
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import PoolTier, leases
from hyper_parallel.offloading.tiers.leases import OWN, held

MiB = 2**20
CPU = backend("cpu")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def pool() -> str:
    return secrets.token_hex(8)


def folder_of(pool: str) -> Path:
    return Path("/dev/shm") / OWN / f"pool-{pool}"


def open_pool(pool: str, holder: str = "here", capacity: int = 64 * MiB) -> PoolTier:
    return PoolTier(CPU, capacity, pool, holder)


def _holds(pool: str, count: int, out: Connection) -> None:
    with open_pool(pool, "rank 3") as tier:
        tier.reserve({0: count})
        out.send("ready")
        out.recv()


def holder(pool: str, count: int) -> tuple[BaseProcess, Connection]:
    here, there = FORK.Pipe()
    child = FORK.Process(target=_holds, args=(pool, count, there), daemon=True)
    child.start()
    assert here.poll(60)
    here.recv()
    return child, here


def test_a_full_pool_says_who_holds_what_and_has_room_when_they_leave(pool: str) -> None:
    child, pipe = holder(pool, 48 * MiB)
    with open_pool(pool) as tier:
        tier.reserve({0: 16 * MiB})
        with pytest.raises(
            TierError,
            match=rf"16\.0 MiB of 64\.0 MiB are free: rank 3 \(process {child.pid}\) holds 48\.0 MiB;",
        ):
            tier.reserve({0: 16 * MiB + 1})
        pipe.send(None)
        child.join()
        tier.reserve({0: 64 * MiB})
    assert not folder_of(pool).exists()


def test_the_lease_of_a_killed_process_comes_back(pool: str) -> None:
    child, _ = holder(pool, 48 * MiB)
    with open_pool(pool) as tier:
        assert sum(held(folder_of(pool)).values()) == 48 * MiB
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        tier.reserve({0: 64 * MiB})
        assert sum(held(folder_of(pool)).values()) == 64 * MiB
    assert not folder_of(pool).exists()


def test_a_pool_whose_only_process_was_killed_is_taken_over(pool: str) -> None:
    child, _ = holder(pool, 48 * MiB)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with open_pool(pool, capacity=8 * MiB) as tier:  # and may be of another size
        tier.reserve({0: 8 * MiB})
    assert not folder_of(pool).exists()


def test_what_is_left_of_another_pool_is_removed_and_what_lives_stays(pool: str) -> None:
    dead, living = pool + "dead", pool + "living"
    killed, _ = holder(dead, 16 * MiB)
    alive, pipe = holder(living, 16 * MiB)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert sum(held(folder_of(dead)).values()) == 16 * MiB
    with open_pool(pool):
        assert not folder_of(dead).exists()
        assert sum(held(folder_of(living)).values()) == 16 * MiB
    pipe.send(None)
    alive.join()
    assert not folder_of(living).exists()


def test_all_must_say_the_same_capacity(pool: str) -> None:
    with (
        open_pool(pool),
        pytest.raises(TierError, match=r"has 64\.0 MiB, and this process expects 32\.0 MiB"),
    ):
        open_pool(pool, capacity=32 * MiB)


def test_a_pool_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"cannot be opened \(Not a directory\)"):
        PoolTier(CPU, MiB, "x", folder=tmp_path / "file")


def test_the_folder_of_all_pools_is_this_users_alone(tmp_path: Path) -> None:
    with PoolTier(CPU, MiB, "x", folder=tmp_path):
        assert stat.S_IMODE((tmp_path / OWN).stat().st_mode) == 0o700
    assert list((tmp_path / OWN).iterdir()) == []


def _open_to_others(there: Path) -> None:
    there.mkdir()
    there.chmod(0o777)


def _elsewhere(there: Path) -> None:
    (there.parent / "elsewhere").mkdir(mode=0o700)
    there.symlink_to("elsewhere")


def _anothers(there: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    there.mkdir(mode=0o700)
    os.chown(there, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_open_to_others, r"other users may write there \(mode 0777\)"),
        (_elsewhere, "it is no folder"),
        (_anothers, "it belongs to user 12345"),
        (os.mkfifo, "it is no folder"),
    ],
)
def test_a_folder_that_somebody_made_first_is_refused(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    make(tmp_path / OWN)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        TierError, match=rf"cannot be opened \({why}; remove it, or have its owner remove it\)"
    ):
        PoolTier(CPU, MiB, "x", folder=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_lock_that_is_never_let_go_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PoolTier(CPU, MiB, "x", folder=tmp_path) as tier:
        monkeypatch.setattr(leases, "PATIENCE_S", 0.1)
        kept = leases.hold(tmp_path / OWN / "pool-x")
        for ask in (lambda: tier.reserve({0: 1}), lambda: PoolTier(CPU, MiB, "x", folder=tmp_path)):
            with pytest.raises(TierError, match="another process has kept its lock"):
                ask()
        os.close(kept)


def _asks_and_gives(pool: str, seed: int, seconds: float, out: Connection) -> None:
    draw, granted, refused = random.Random(seed), 0, 0
    with open_pool(pool, f"rank {seed}") as tier:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            count = draw.randrange(40 * MiB)
            try:
                tier.reserve({0: count})
            except TierError:
                refused += 1
                tier.reserve({})
            else:
                granted += 1
                x = torch.full((count,), seed, dtype=torch.uint8)
                tier.begin_write(0, x).wait()
                x.zero_()
                tier.begin_read(0, x).wait()
                assert bool((x == seed).all())
    out.send((granted, refused))


def test_four_processes_never_hold_more_than_there_is(pool: str) -> None:
    children, pipes = [], []
    for seed in range(4):
        here, there = FORK.Pipe()
        children.append(FORK.Process(target=_asks_and_gives, args=(pool, seed, 2.0, there), daemon=True))
        pipes.append(here)
    with open_pool(pool):
        for child in children:
            child.start()
        most, looks = 0, 0
        while any(child.is_alive() for child in children):
            with leases.alone(folder_of(pool)):
                most = max(most, sum(held(folder_of(pool)).values()))
            looks += 1
        counts = []
        for pipe in pipes:
            assert pipe.poll(60)
            counts.append(pipe.recv())
    assert 40 * MiB < most <= 64 * MiB
    assert looks > 50
    assert all(granted for granted, _ in counts)
    assert sum(refused for _, refused in counts), "nobody was ever refused, so that nothing was tried"
    assert not folder_of(pool).exists()
