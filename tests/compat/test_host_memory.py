"""Host memory for copies: exact, aligned, locked and unlocked where the device wants it."""

from __future__ import annotations

import mmap
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch

from hyper_parallel.compat import TorchBackend, backend
from hyper_parallel.compat.host_memory import HostPages, TorchPages

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("counts", [(1, PAGE + 1, 5), (3 * PAGE, 0, 2 * PAGE)])
def test_what_was_there_stays_when_its_size_changes(counts: tuple[int, ...]) -> None:
    memory = backend("cpu").host_pages(counts[0])
    memory.tensor.fill_(7)
    for before, count in pairwise(counts):
        memory.resize(count)
        assert memory.tensor.shape == (count,)
        assert memory.tensor.data_ptr() % PAGE == 0
        assert bool((memory.tensor[: min(before, count)] == 7).all())
        memory.tensor.fill_(7)
    memory.close()
    memory.close()
    assert memory.tensor.numel() == 0


def test_pages_are_locked_at_each_size_and_unlocked_before_they_move() -> None:
    locked: list[int] = []

    def pin(host: torch.Tensor) -> object:
        locked.append(host.data_ptr())
        return lambda: locked.remove(host.data_ptr())

    memory = HostPages(100, pin)  # type: ignore[arg-type]
    for count in (10 * PAGE, 5):
        memory.resize(count)
        assert locked == [memory.tensor.data_ptr()]
    memory.close()
    assert not locked


class Runtime:
    """The runtime of a device that locks pages: what it was asked, by address."""

    def __init__(self, code: int) -> None:
        self.code, self.locked = code, {}

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        if not self.code:
            self.locked[address] = count
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


class Locking(TorchBackend):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__("dummy", "dummyccl")
        self._runtime = runtime

    @property
    def module(self) -> ModuleType:
        return cast(ModuleType, SimpleNamespace(cudart=lambda: self._runtime))


def test_an_accelerators_runtime_locks_exactly_what_is_asked() -> None:
    runtime = Runtime(0)
    memory = Locking(runtime).host_pages(3 * PAGE + 1)
    assert runtime.locked == {memory.tensor.data_ptr(): 3 * PAGE + 1}
    memory.resize(PAGE)
    assert list(runtime.locked.values()) == [PAGE]
    memory.close()
    assert not runtime.locked


def test_pages_that_cannot_be_locked_are_said_and_used(caplog: pytest.LogCaptureFixture) -> None:
    memory = Locking(Runtime(2)).host_pages(100)
    assert "could not be locked" in caplog.text
    memory.tensor.fill_(1)
    memory.close()


def test_without_such_a_runtime_pytorch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, zeros = [], torch.zeros

    def pinned(*args: object, pin_memory: bool, **more: object) -> torch.Tensor:
        asked.append(pin_memory)
        return zeros(*args, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "zeros", pinned)
    memory = TorchPages(10)
    memory.tensor.fill_(7)
    memory.resize(20)
    assert memory.tensor.tolist() == [7] * 10 + [0] * 10
    assert asked == [True, True]


def test_a_streams_work_is_done_where_it_is_given_on_the_cpu() -> None:
    stream, seen = backend("cpu").OwnStream(), []
    stream.run(lambda: seen.append(1))
    assert seen == [1]
    assert stream.query()
    stream.synchronize()
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1 / 0)
