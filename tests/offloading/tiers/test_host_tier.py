"""The host tier's memory: taken and touched at once, within what there is, and given back."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path

import pytest
import torch

from hyper_parallel.compat import backend
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.tiers import HostTier

MiB = 2**20
CPU = backend("cpu")


def resident() -> int:
    return CPU.memory_allocated()


def test_memory_is_there_after_reserve_and_gone_after_close() -> None:
    before, tier = resident(), HostTier(CPU, 1024 * MiB)
    assert resident() < before + 16 * MiB, "taken by reserve only"
    tier.reserve({0: 64 * MiB, 1: 64 * MiB})
    assert resident() > before + 120 * MiB
    tier.reserve({0: 64 * MiB})
    assert resident() < before + 80 * MiB
    tier.close()
    assert resident() < before + 16 * MiB


def test_growing_does_not_take_the_memory_twice() -> None:
    with HostTier(CPU, 1024 * MiB) as tier:
        tier.reserve({0: 128 * MiB})
        tier.begin_write(0, torch.ones(128 * MiB, dtype=torch.uint8)).wait()
        CPU.reset_memory_peak()
        before = resident()
        tier.reserve({0: 128 * MiB, 1: 32 * MiB})
        assert CPU.memory_peak() < before + 64 * MiB
        x = torch.zeros(128 * MiB, dtype=torch.uint8)
        tier.begin_read(0, x).wait()
        assert bool((x == 1).all())


def test_a_machine_with_too_little_memory_is_found_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 1 kB\nMemAvailable: 1024 kB\n")
    with HostTier(CPU, 64 * MiB) as tier, pytest.raises(TierError, match=r"needs 2\.0 MiB.* has 1\.0 MiB"):
        tier.reserve({0: 2 * MiB})


def _under_a_limit(out: multiprocessing.connection.Connection) -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    tier = HostTier(CPU, 1024 * MiB)
    resource.setrlimit(resource.RLIMIT_DATA, (data + 96 * MiB, resource.RLIM_INFINITY))
    tier.reserve({0: 16 * MiB})
    tier.begin_write(0, torch.ones(16 * MiB, dtype=torch.uint8)).wait()
    try:
        tier.reserve({0: 16 * MiB, 1: 256 * MiB})
    except TierError as error:
        x = torch.zeros(16 * MiB, dtype=torch.uint8)
        tier.begin_read(0, x).wait()
        out.send((str(error), bool((x == 1).all())))
    else:
        out.send(("nothing was raised", False))


def test_a_limit_on_the_process_counts_and_what_was_there_stays() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_under_a_limit, args=(there,), daemon=True)
    child.start()
    assert here.poll(60)
    message, kept = here.recv()
    child.join()
    assert "the system refused 256.0 MiB" in message
    assert "ulimit -d" in message
    assert kept
