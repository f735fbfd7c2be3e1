"""The rehearsal device is a fair judge: it computes what the CPU computes, later, and sees what is not in order."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable

import pytest
import torch

from device import rehearsal
from device.build import missing
from device.process import in_fresh_processes

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def computes_what_the_cpu_computes(device: torch.device) -> None:
    x = torch.randn(6, 8)
    y = x.to(device)
    for own, cpu in (
        (y @ y.T, x @ x.T),
        (y[1:, ::2].softmax(-1), x[1:, ::2].softmax(-1)),
        ((y > 0).nonzero(), (x > 0).nonzero()),
        (y.to(torch.bfloat16).sum(0), x.to(torch.bfloat16).sum(0)),
        (y.view(torch.int32), x.view(torch.int32)),
        (y[torch.tensor([2, 0])], x[torch.tensor([2, 0])]),
    ):
        assert own.device == torch.device(rehearsal.NAME, 0)
        assert torch.equal(own.cpu(), cpu)
    part = y.narrow(0, 1, 2)
    part.fill_(3)
    assert bool((y[1:3] == 3).all()), "a view writes through"
    torch.manual_seed(5)
    drawn = torch.randn(9, device=device).cpu()
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.randn(9)), "the CPU's numbers, of a generator of its own"
    assert not rehearsal.races()


def the_host_runs_ahead(device: torch.device) -> None:
    x = torch.ones(400, 400, device=device)
    torch.accelerator.synchronize()
    rehearsal.delay(1, 50_000)
    for _ in range(8):
        x = x @ x / 400
    done = torch.Event(device)
    done.record()
    assert not done.query()
    done.synchronize()
    assert float(x.sum()) == 160_000.0


def streams_that_do_not_wait_race(device: torch.device) -> None:
    other = torch.Stream(device)
    x = torch.zeros(64, device=device)
    torch.accelerator.synchronize()
    rehearsal.sites(True)
    with other:
        x.add_(1)
    (x + 1).cpu()
    assert "aten::add.out at test_rehearsal_device.py" in rehearsal.races()[0]
    rehearsal.clear_races()
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        x.add_(1)
    torch.accelerator.current_stream().wait_event(other.record_event())
    (x + 1).cpu()
    assert not rehearsal.races()


def parts_of_a_block_do_not_race(device: torch.device) -> None:
    other = torch.Stream(device)
    x = torch.zeros(2, 64, device=device)
    torch.accelerator.synchronize()
    with other:
        x[0].add_(1)
    x[1].add_(1)
    assert not rehearsal.races()


def memory_that_another_stream_still_reads_is_not_given_back(device: torch.device) -> None:
    other = torch.Stream(device)
    with other:
        x = torch.zeros(64, device=device)
    torch.accelerator.current_stream().wait_event(other.record_event())
    y = x + 1
    del x
    assert "memory that is given back does not wait for aten::add.out" in rehearsal.races()[0]
    rehearsal.clear_races()
    with other:
        x = torch.zeros(64, device=device)
    torch.accelerator.current_stream().wait_event(other.record_event())
    y = x + y
    x.record_stream(torch.accelerator.current_stream())
    del x
    assert not rehearsal.races()
    assert bool((y == 1).all())


def memory_is_poisoned_when_its_stream_has_used_it(device: torch.device) -> None:
    assert bool(torch.empty(64, device=device).isnan().all()), "nothing was written"
    x = torch.zeros(64, device=device)
    rehearsal.delay(1, 5000)
    y = x + 1
    del x
    assert bool((y == 1).all()), "in the order of the stream"
    assert bool(torch.empty(64, device=device).isnan().all())


def copies_take_what_is_there_when_they_run(device: torch.device) -> None:
    late, pageable = torch.zeros(64, pin_memory=True), torch.zeros(64)
    assert late.is_pinned() and not pageable.is_pinned()
    x, y = torch.empty(64, device=device), torch.empty(64, device=device)
    torch.accelerator.synchronize()
    gate = torch.ones(700, 700, device=device)
    for _ in range(4):
        gate = gate @ gate / 700
    x.copy_(late, non_blocking=True)
    late.fill_(1)
    y.copy_(pageable, non_blocking=True)
    pageable.fill_(1)
    assert bool((x == 1).all()), "pinned memory was changed under way"
    assert bool((y == 0).all()), "a copy from pageable memory is over when it returns"


def memory_is_counted_and_bounded(device: torch.device) -> None:
    torch.accelerator.empty_cache()
    module = torch.rehearsal  # type: ignore[attr-defined]
    before = module.memory_allocated()
    x = torch.empty(1 << 20, device=device)
    assert module.memory_allocated() - before == 4 << 20
    del x
    assert module.memory_allocated() == before and module.max_memory_allocated() >= before + (4 << 20)
    rehearsal.limit(8 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="rehearsal out of memory"):
        torch.empty(4 << 20, device=device)
    assert torch.empty(1 << 20, device=device).numel() == 1 << 20, "after that it goes on"
    rehearsal.limit(1 << 30)


def devices_are_apart(device: torch.device) -> None:
    x, y = torch.ones(3, device=device), torch.ones(3, device=torch.device(rehearsal.NAME, 1))
    assert y.device.index == 1 and torch.equal(y.to(device).cpu(), x.cpu())
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + y
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(3)


CHECKS: tuple[Callable[[torch.device], None], ...] = (
    computes_what_the_cpu_computes,
    the_host_runs_ahead,
    streams_that_do_not_wait_race,
    parts_of_a_block_do_not_race,
    memory_that_another_stream_still_reads_is_not_given_back,
    memory_is_poisoned_when_its_stream_has_used_it,
    copies_take_what_is_there_when_they_run,
    memory_is_counted_and_bounded,
    devices_are_apart,
)


def _checked(rank: int, world: int) -> dict[str, str]:
    """What failed, by check."""
    rehearsal.install()
    failed = {}
    for check in CHECKS:
        try:
            check(torch.device(rehearsal.NAME, 0))
        except Exception:
            failed[check.__name__] = traceback.format_exc()
        torch.accelerator.synchronize()
        rehearsal.delay(0, 0)
        rehearsal.sites(False)
        rehearsal.clear_races()
    return failed


@pytest.fixture(scope="module")
def failed() -> dict[str, str]:
    """Of all checks, in one process."""
    return in_fresh_processes(_checked, 1)[0]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_the_device(check: str, failed: dict[str, str]) -> None:
    assert check not in failed, failed[check]


def _touched(rank: int, world: int) -> None:
    rehearsal.install()
    x = torch.ones(4, device=rehearsal.NAME)
    torch.accelerator.synchronize()
    print("launched", flush=True)
    ctypes.string_at(x.data_ptr(), 4)


def test_the_host_cannot_read_its_memory() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with -11:\nlaunched.*Segmentation fault"):
        in_fresh_processes(_touched, 1)
