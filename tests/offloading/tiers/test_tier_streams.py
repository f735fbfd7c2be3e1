"""On an accelerator copies wait for the compute and the compute for copies, and the calling thread for neither.

The accelerator is the dummy of `harness.dummy_device`: kernels, copies among them, are queued on the stream that is
current, and done by that stream's thread.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from harness import dummy_device
from hyper_parallel.compat import Backend, TorchBackend
from hyper_parallel.compat.host_memory import HostMemory
from hyper_parallel.offloading.tiers import FlashTier, HostTier, PoolTier, Tier

COUNT = 3 * 2**20 + 5


class Dummy(TorchBackend):
    """An accelerator whose memory is the host's."""

    def __init__(self) -> None:
        super().__init__("dummy", "dummyccl")

    @property
    def module(self) -> ModuleType:
        names = ("Stream", "Event", "current_stream")
        return cast(
            ModuleType,
            SimpleNamespace(
                stream=dummy_device._stream,
                synchronize=dummy_device.synchronize_all,
                **{name: getattr(dummy_device, name) for name in names},
            ),
        )

    def host_pages(self, count: int) -> HostMemory:
        return Backend.host_pages(self, count)


@pytest.fixture(autouse=True)
def queued_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """`copy_` launches a copy, as it does on an accelerator."""
    copied = Tensor.copy_

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        dummy_device.launch(lambda: copied(target, source))
        return target

    monkeypatch.setattr(Tensor, "copy_", copy_)


@pytest.fixture(params=["host", "flash", "pool"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    backend: Any = Dummy()
    made: Tier
    if request.param == "host":
        made = HostTier(backend, 2**30, time_limit=20)
    elif request.param == "flash":
        made = FlashTier(tmp_path, backend, time_limit=20)
    else:
        made = PoolTier(backend, 2**30, secrets.token_hex(8), time_limit=20)
    made.reserve({0: COUNT, 1: COUNT})
    yield made
    made.close()


def test_a_write_waits_for_the_kernel_that_computes_what_is_written(tier: Tier) -> None:
    gate, x, y = (
        threading.Event(),
        torch.zeros(COUNT, dtype=torch.uint8),
        torch.zeros(COUNT, dtype=torch.uint8),
    )
    dummy_device.launch(gate.wait)
    dummy_device.launch(lambda: x.fill_(3))
    written = tier.begin_write(0, x)
    assert not written.done()
    gate.set()
    written.wait()
    read = tier.begin_read(0, y)
    read.wait()
    dummy_device.synchronize_all()
    assert bool((y == 3).all())
    assert written.done()
    assert read.done()


def test_a_read_waits_for_the_kernels_that_still_use_the_memory(tier: Tier) -> None:
    x = torch.full((COUNT,), 3, dtype=torch.uint8)
    tier.begin_write(0, x).wait()
    dummy_device.synchronize_all()
    gate, seen = threading.Event(), []
    x.fill_(4)
    dummy_device.launch(gate.wait)
    dummy_device.launch(lambda: seen.append(int(x.max())))  # an earlier user of the memory
    read = tier.begin_read(0, x)
    threading.Timer(0.1, gate.set).start()
    read.wait()
    dummy_device.launch(lambda: seen.append(int(x.max())))
    dummy_device.synchronize_all()
    assert seen == [4, 3]


def test_a_kernel_after_the_wait_finds_the_copy_over(tier: Tier) -> None:
    x, seen = torch.full((COUNT,), 3, dtype=torch.uint8), []
    for number in range(20):
        dummy_device.launch(lambda number=number: x.fill_(number))
        tier.begin_write(number % 2, x).wait()
        dummy_device.launch(lambda: x.fill_(99))  # the memory is used again
        tier.begin_read(number % 2, x).wait()
        dummy_device.launch(lambda: seen.append((int(x.min()), int(x.max()))))
    dummy_device.synchronize_all()
    assert seen == [(number, number) for number in range(20)]


def test_the_thread_does_not_wait_for_memory_that_the_device_copies_to(tier: Tier) -> None:
    if tier.name == "flash":
        pytest.skip("a disk is written by threads of the host")
    gate, x = threading.Event(), torch.zeros(COUNT, dtype=torch.uint8)
    dummy_device.launch(gate.wait)
    pending = tier.begin_write(0, x)
    pending.wait()  # which would end at the time limit with an error
    assert not pending.done()
    gate.set()
    dummy_device.synchronize_all()
    assert pending.done()


def test_copies_of_one_slot_follow_one_another_across_the_streams(tier: Tier) -> None:
    gate, seen = threading.Event(), []
    dummy_device.launch(gate.wait)
    for number in range(6):
        x, y = torch.full((COUNT,), number, dtype=torch.uint8), torch.full((COUNT,), 99, dtype=torch.uint8)
        tier.begin_write(0, x)
        seen.append((y, tier.begin_read(0, y)))
    gate.set()
    for _, pending in seen:
        pending.wait()
    dummy_device.synchronize_all()
    assert [int(y.max()) for y, _ in seen] == list(range(6))
