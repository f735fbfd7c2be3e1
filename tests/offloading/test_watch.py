"""Links that are not as fast as planned are found, and those that only wait or hiccup are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyper_parallel.compat import Backend, backend
from hyper_parallel.offloading.runtime import FIRST, LARGE, STEPS, BandwidthMonitor
from hyper_parallel.offloading.schedule.problem import OffloadTier, Rate
from hyper_parallel.offloading.tiers import FlashTier, HostTier, Tier

RATE = Rate(1e-3, 1e9)
SPACES = (OffloadTier("host", 2**40, RATE, RATE), OffloadTier("flash", 2**40, RATE, RATE))


def _copy(seconds: float | None, done: bool = True) -> Any:
    return SimpleNamespace(seconds=seconds, done=lambda: done)


def _steps(watch: BandwidthMonitor, count: int, slower: Callable[[int], float], out: bool = True) -> None:
    for step in range(count):
        for count in (LARGE, 4 * LARGE):
            watch.began("host", out, count, _copy(RATE.seconds(count) * slower(step)))
        watch.ended()


def test_a_link_that_is_slower_in_every_step_departs_and_is_measured() -> None:
    watch = BandwidthMonitor(SPACES)
    _steps(watch, FIRST + STEPS - 1, lambda step: 1.5)
    assert not watch.departed
    _steps(watch, 1, lambda step: 2.5)
    assert watch.departed == {("host", True): pytest.approx(1.5)}
    assert list(watch.told()) == ["to host 0.667 GB/s instead of 1"]
    host, flash = watch.measured()
    assert host.out == Rate(pytest.approx(1.5e-3), pytest.approx(1e9 / 1.5))
    assert (host.back, flash) == (RATE, SPACES[1])
    watch.plan_by(watch.measured())
    assert not watch.departed
    _steps(watch, STEPS, lambda step: 1.5)
    assert not watch.departed, "that is what is planned by now"
    _steps(watch, STEPS, lambda step: 1.0)
    assert list(watch.departed) == [("host", True)], "it became faster again"


@pytest.mark.parametrize(
    "slower",
    [lambda step: 1.15, lambda step: 30.0 if step == 6 else 1.0, lambda step: 1.5 if step % 4 else 0.9],
    ids=["a little", "once", "now and then"],
)
def test_what_is_noise_does_not_depart(slower: Callable[[int], float]) -> None:
    watch = BandwidthMonitor(SPACES)
    for _ in range(5):
        _steps(watch, FIRST + STEPS, slower)
        assert not watch.departed


def test_small_copies_failed_ones_and_those_under_way_do_not_count() -> None:
    watch = BandwidthMonitor(SPACES)
    for _ in range(FIRST + 2 * STEPS):
        watch.began("host", True, LARGE - 1, _copy(9.0))
        watch.began("host", True, LARGE, _copy(None))
        watch.began("host", True, LARGE, _copy(None, done=False))
        watch.ended()
    assert not watch.ratios
    assert len(watch._copies) == FIRST + 2 * STEPS, "those that are under way are asked again"


@pytest.mark.parametrize("name", ["host", "flash"])
def test_what_a_copy_waits_for_is_not_its_links_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Backend = backend("cpu")
    tier: Tier = HostTier(device, 2**24) if name == "host" else FlashTier(tmp_path, device)
    slow, taken = 0.05, 4
    usual = type(device).copy_bytes

    def copy_bytes(self: Backend, target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(slow)
        usual(self, target, source)

    monkeypatch.setattr(type(device), "copy_bytes", copy_bytes)
    x = torch.ones(2**16, dtype=torch.uint8)
    try:
        tier.reserve(dict.fromkeys(range(taken), x.numel()))
        started = time.perf_counter()
        queued = [tier.begin_write(slot, x) for slot in range(taken)]
        assert queued[-1].seconds is None
        for copy in queued:
            copy.wait()
            while not copy.done():
                time.sleep(1e-3)
        wall = time.perf_counter() - started
        seconds = [copy.seconds for copy in queued]
    finally:
        tier.close()
    assert None not in seconds
    # Each copy waits for those before it; flash has three lanes, whose link is all of them together.
    assert slow * -(-taken // 3) <= sum(one for one in seconds if one is not None) <= wall
