"""What the host computes in a tier's slots: in order with the copies to and from them, and beside all else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from hyper_parallel.compat import backend
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import HostTier, PoolTier, Workplace, measure_work

CPU = backend("cpu")
MiB = 2**20


@pytest.fixture(params=["host", "pool"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostTier | PoolTier]:
    made = (
        HostTier(CPU, 4 * MiB) if request.param == "host" else PoolTier(CPU, 4 * MiB, "work", folder=tmp_path)
    )
    made.reserve({0: 100, 1: 100, 2: 100})
    with made:
        yield made


def _add(memory: Sequence[torch.Tensor]) -> None:
    first, second = memory
    second += first


def test_work_sees_what_was_written_before_and_is_seen_by_what_is_read_after(tier: Workplace) -> None:
    ones, got = torch.ones(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    for _ in range(20):
        tier.begin_write(0, ones)
        tier.begin_write(1, ones * 2)
        for _ in range(3):
            tier.begin_work("adding", (0, 1), _add)
        tier.begin_read(1, got).wait()
        assert bool((got == 5).all())


def test_work_waits_for_nobody_elses_copies_and_holds_up_nobody_elses(tier: Workplace) -> None:
    ones, got = torch.ones(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    for slot in range(3):
        tier.begin_write(slot, ones).wait()
    go = threading.Event()
    tier.begin_work("waiting", (0, 1), lambda memory: go.wait(10))
    after = tier.begin_read(1, torch.zeros(100, dtype=torch.uint8))
    tier.begin_read(2, got).wait()
    assert bool((got == 1).all())
    assert not after.done()
    go.set()
    after.wait()


def test_a_slot_is_written_again_only_when_the_work_on_it_is_over(tier: Workplace) -> None:
    ones, got = torch.ones(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    tier.begin_write(0, ones)
    tier.begin_write(1, ones)
    go = threading.Event()

    def work(memory: Sequence[torch.Tensor]) -> None:
        go.wait(10)
        _add(memory)

    tier.begin_work("adding", (0, 1), work)
    tier.begin_write(0, ones * 7)
    threading.Timer(0.05, go.set).start()
    tier.begin_read(1, got).wait()
    assert bool((got == 2).all())
    tier.begin_read(0, got).wait()
    assert bool((got == 7).all())


def test_work_that_fails_is_told_by_what_reads_its_result(tier: Workplace) -> None:
    tier.begin_write(0, torch.ones(100, dtype=torch.uint8))

    def fails(memory: Sequence[torch.Tensor]) -> None:
        raise ArithmeticError("too large")

    tier.begin_work("adding up", (0,), fails)
    with pytest.raises(TierError, match=r"reading slot 0 .* adding up failed: too large"):
        tier.begin_read(0, torch.zeros(100, dtype=torch.uint8)).wait()


def test_a_slot_that_nothing_is_in_is_refused(tier: Workplace) -> None:
    with pytest.raises(TierError, match="nothing is in it"):
        tier.begin_work("adding", (0, 1), _add)


def test_what_work_left_survives_another_reservation(tier: Workplace) -> None:
    ones, got = torch.ones(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    tier.begin_write(0, ones)
    tier.begin_write(1, ones)
    tier.begin_work("adding", (0, 1), _add)
    tier.reserve({1: 100, 5: 2 * MiB})
    tier.begin_read(1, got).wait()
    assert bool((got == 2).all())


def test_a_rate_is_found_and_the_tier_left_empty(tier: Workplace) -> None:
    assert measure_work(tier, CPU, MiB) > 0
    with pytest.raises(TierError, match="no slot 0"):
        tier.begin_write(0, torch.ones(1, dtype=torch.uint8))
