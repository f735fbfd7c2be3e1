"""What every tier must do: the same checks for host, flash and pool."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hyper_parallel.compat import backend
from hyper_parallel.compat.cpu import CpuBackend
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import FlashTier, HostTier, PoolTier, Tier, measure, slots

MiB = 2**20
CPU = backend("cpu")
Make = Callable[..., Tier]


@pytest.fixture(params=["host", "flash", "pool"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Opens a tier of each kind; all are closed in the end."""
    opened: list[Tier] = []

    def open_one(capacity: int = 64 * MiB, **more: float) -> Tier:
        tier: Tier
        if request.param == "host":
            tier = HostTier(CPU, capacity, **more)
        elif request.param == "flash":
            tier = FlashTier(tmp_path / "spill", CPU, capacity, **more)
        else:
            tier = PoolTier(CPU, capacity, secrets.token_hex(8), **more)
        opened.append(tier)
        return tier

    yield open_one
    for tier in opened:
        tier.close()


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def back(tier: Tier, slot: int, count: int) -> Tensor:
    x = torch.zeros(count, dtype=torch.uint8)
    tier.begin_read(slot, x).wait()
    return x


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 2 * MiB, 5 * MiB + 3])
def test_bytes_come_back_as_they_went(make: Make, count: int) -> None:
    tier, x = make(), noise(count)
    tier.reserve({7: count, 8: 10})
    tier.begin_write(7, x).wait()
    tier.begin_write(8, noise(10, 1)).wait()
    assert torch.equal(back(tier, 7, count), x)


def test_many_copies_under_way_at_once_each_find_their_slot(make: Make) -> None:
    tier = make()
    xs = {slot: noise(1 + slot * 70_001, slot) for slot in range(20)}
    tier.reserve({slot: len(x) for slot, x in xs.items()})
    for slot, x in xs.items():
        tier.begin_write(slot, x)
    ys = {slot: torch.zeros_like(x) for slot, x in xs.items()}
    for pending in [tier.begin_read(slot, y) for slot, y in ys.items()]:
        assert pending.wait() >= 0
        assert pending.done()
    assert all(torch.equal(xs[slot], ys[slot]) for slot in xs)


def test_a_read_comes_after_the_write_before_it_and_before_the_one_after_it(make: Make) -> None:
    tier, count = make(), 8 * MiB
    tier.reserve({0: count})
    versions = [torch.full((count,), number, dtype=torch.uint8) for number in range(1, 6)]
    seen = [torch.zeros_like(versions[0]) for _ in versions]
    last = []
    for x, y in zip(versions, seen, strict=True):
        tier.begin_write(0, x)
        last.append(tier.begin_read(0, y))
    for pending in last:
        pending.wait()
    assert all(torch.equal(x, y) for x, y in zip(versions, seen, strict=True))


def test_slots_that_share_memory_lose_what_the_other_is_given(make: Make) -> None:
    tier = make()
    tier.reserve({1: 8192, 2: 4096, 3: 4096}, {1: 0, 2: 4096, 3: 8192})
    tier.begin_write(1, noise(8192)).wait()
    tier.begin_write(3, noise(4096, 3)).wait()
    assert torch.equal(back(tier, 1, 8192), noise(8192))
    tier.begin_write(2, noise(4096, 2)).wait()
    assert torch.equal(back(tier, 2, 4096), noise(4096, 2))
    assert torch.equal(back(tier, 3, 4096), noise(4096, 3))
    with pytest.raises(TierError, match=r"slot 1 .*nothing is in it"):
        tier.begin_read(1, torch.zeros(8192, dtype=torch.uint8))


def test_more_than_the_capacity_is_refused_and_nothing_changes(make: Make) -> None:
    tier = make(capacity=MiB)
    tier.reserve({0: 4096})
    tier.begin_write(0, noise(4096)).wait()
    with pytest.raises(TierError, match=r"1\.0 MiB"):
        tier.reserve({0: 4096, 1: MiB})
    assert torch.equal(back(tier, 0, 4096), noise(4096))
    tier.reserve({0: 4096, 1: MiB - 4096})  # to the last byte


@pytest.mark.parametrize("offsets", [None, {4: 0, 2: 12288, 9: 8 * MiB, 3: 3 * MiB + 12288}])
def test_what_stays_survives_another_plan(make: Make, offsets: dict[int, int] | None) -> None:
    tier = make()
    sizes = {1: 100_000, 2: 3 * MiB, 3: 12345, 4: 1}
    tier.reserve(sizes)
    for slot, count in sizes.items():
        tier.begin_write(slot, noise(count, slot))  # not waited for: `reserve` does
    tier.reserve({4: 1, 2: 3 * MiB, 9: 20 * MiB, 3: 12345}, offsets)
    for slot in (2, 3, 4):
        assert torch.equal(back(tier, slot, sizes[slot]), noise(sizes[slot], slot))
    tier.reserve({3: 12345})
    assert torch.equal(back(tier, 3, 12345), noise(12345, 3))
    with pytest.raises(TierError, match="no slot 2"):
        tier.begin_write(2, noise(1))


def test_another_plan_waits_for_copies_under_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, count = make(), 20 * MiB
    tier.reserve({0: MiB, 1: count, 2: count})
    tier.begin_write(1, noise(count, 1)).wait()
    gate, copied = threading.Event(), CpuBackend.copy_bytes
    monkeypatch.setattr(
        CpuBackend, "copy_bytes", lambda *args, **more: (gate.wait(), copied(*args, **more))[1]
    )
    y = torch.zeros(count, dtype=torch.uint8)
    read, write = tier.begin_read(1, y), tier.begin_write(2, noise(count, 2))
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    tier.reserve({2: count, 1: count})
    assert read.done()
    assert write.done()
    assert torch.equal(y, noise(count, 1))
    assert torch.equal(back(tier, 1, count), noise(count, 1))
    assert torch.equal(back(tier, 2, count), noise(count, 2))
    timer.join()


def test_a_plan_without_a_slot_waits_until_it_is_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, count = make(), 20 * MiB
    tier.reserve({1: count})
    tier.begin_write(1, noise(count, 1)).wait()
    gate, copied = threading.Event(), CpuBackend.copy_bytes
    monkeypatch.setattr(
        CpuBackend, "copy_bytes", lambda *args, **more: (gate.wait(), copied(*args, **more))[1]
    )
    y = torch.zeros(count, dtype=torch.uint8)
    read = tier.begin_read(1, y)
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    tier.reserve({})
    read.wait()
    assert torch.equal(y, noise(count, 1))
    timer.join()


def test_plans_that_cannot_be_honoured_are_refused(make: Make) -> None:
    tier = make()
    tier.reserve({1: 8192, 2: 8192})
    tier.begin_write(1, noise(8192, 1)).wait()
    tier.begin_write(2, noise(8192, 2)).wait()
    with pytest.raises(TierError, match="both hold something"):
        tier.reserve({1: 8192, 2: 8192}, {1: 0, 2: 4096})
    with pytest.raises(TierError, match="must keep its size"):
        tier.reserve({1: 4096})
    with pytest.raises(TierError, match="multiple of"):
        tier.reserve({3: 8192}, {3: 1})
    with pytest.raises(TierError, match="no offset"):
        tier.reserve({3: 1, 4: 1}, {3: 0})
    assert torch.equal(back(tier, 2, 8192), noise(8192, 2))


def test_a_slot_gives_back_only_what_was_written(make: Make) -> None:
    tier = make()
    tier.reserve({0: 100, 1: 100})
    with pytest.raises(TierError, match="nothing is in it"):
        tier.begin_read(0, noise(100))
    with pytest.raises(TierError, match="room for 100"):
        tier.begin_write(0, noise(101))
    tier.begin_write(0, noise(60)).wait()
    with pytest.raises(TierError, match="holds 60 bytes, and 100"):
        tier.begin_read(0, noise(100))
    assert torch.equal(back(tier, 0, 60), noise(60))


def test_a_wait_has_a_time_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, gate = make(time_limit=0.2), threading.Event()
    tier.reserve({0: 100})
    copied = CpuBackend.copy_bytes
    monkeypatch.setattr(
        CpuBackend, "copy_bytes", lambda *args, **more: (gate.wait(), copied(*args, **more))[1]
    )
    pending = tier.begin_write(0, noise(100))
    assert not pending.done()
    try:
        with pytest.raises(TierError, match=r"writing slot 0 .* within 0\.2 s"):
            pending.wait()
    finally:
        gate.set()


def test_waiting_says_for_how_long(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make()
    tier.reserve({0: 100})
    pending = tier.begin_write(0, noise(100))
    clock = iter((10.0, 13.5))
    monkeypatch.setattr(slots, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert pending.wait() == 3.5


def test_a_copy_that_fails_says_so_and_so_does_what_relies_on_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    tier.reserve({0: 100})

    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(CpuBackend, "copy_bytes", broken)
    pending = tier.begin_write(0, noise(100))
    with pytest.raises(TierError, match="the device is lost"):
        pending.wait()
    monkeypatch.undo()
    with pytest.raises(TierError, match="the device is lost"):
        tier.begin_read(0, noise(100)).wait()
    tier.begin_write(0, noise(100)).wait()
    assert torch.equal(back(tier, 0, 100), noise(100))


def test_a_closed_tier_says_so(make: Make) -> None:
    tier = make()
    tier.reserve({0: 10})
    tier.close()
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.begin_write(0, noise(10))


def test_rates_are_of_both_ways_and_leave_the_tier_empty(make: Make) -> None:
    tier = make(capacity=4 * MiB)
    for rate in measure(tier, CPU):
        assert rate.bandwidth > 0
        assert rate.latency >= 0
    with pytest.raises(TierError, match="no slot 0"):
        tier.begin_write(0, noise(1))


def test_what_was_copied_can_lose_its_memory_and_get_it_back(make: Make) -> None:
    tier, x = make(), noise(100_000)
    tier.reserve({0: x.numel()})
    for _ in range(2):
        tier.begin_write(0, x).wait()
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(100_000)
        tier.begin_read(0, x).wait()
    assert torch.equal(x, noise(100_000))
