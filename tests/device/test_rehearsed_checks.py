"""What `benchmarks/gpu.py` checks on an accelerator, on the rehearsal device; and that planted faults show."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable

import gpu
import gpu_steps
import pytest
import torch

from device import rehearsal
from device.build import missing
from device.process import in_fresh_processes
from hyper_parallel import compat
from hyper_parallel.compat.accelerator import TorchEvent, TorchStream

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LATE = 500
"""Microseconds by which work begins late, at most."""
Part = Callable[[compat.Backend, torch.device], list[gpu_steps.Check]]
PARTS: dict[str, Part] = {
    "families": lambda backend, device: gpu.check_equivalence(device, ("llama",)),
    "experts": lambda backend, device: gpu.check_equivalence(device, ("mixtral",)),
    "engines": lambda backend, device: gpu_steps.check_engines(device, gpu.FAMILIES, ("llama",)),
    "a checkpoint": lambda backend, device: gpu.check_checkpoint(device),
    "copies": lambda backend, device: gpu.check_copies(backend, device)[0],
    "budgets": lambda backend, device: gpu_steps.check_budgets(backend, device, gpu.FAMILIES, ("llama",)),
    "generation": lambda backend, device: gpu.check_generation(
        device, gpu.FAMILIES, ("llama",), ("llama",), 16
    ),
}

SLOW = ("experts", "generation")
QUICK = tuple(part for part in PARTS if part not in SLOW)


def _waits(where: Callable[[bool], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Waits for events are left out on the main stream (True), or on others."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        wait = TorchEvent.wait

        def some(self: TorchEvent, stream: TorchStream | None = None) -> None:
            main = stream is None and self._module.current_stream() == self._module.default_stream()
            if not where(main):
                wait(self, stream)

        monkeypatch.setattr(TorchEvent, "wait", some)

    return plant


def _recorded_on_the_main_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TorchEvent, "record", lambda self, stream=None: self.native.record(self._module.default_stream())
    )


def _nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchEvent, "record", lambda self, stream=None: None)


FAULTS = {
    "steps do not wait for copies": _waits(lambda main: main),
    "copies do not wait for steps": _waits(lambda main: not main),
    "copies are marked on the stream of the step": _recorded_on_the_main_stream,
    "nothing is marked": _nothing_recorded,
}


Found = dict[str, tuple[list[gpu_steps.Check], list[str], str]]
"""Checks, races, and the error, by part."""


def _checked(rank: int, world: int, parts: tuple[str, ...], seed: int, fault: str | None) -> Found:
    rehearsal.install()
    rehearsal.sites(True)
    rehearsal.delay(seed, LATE)
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
    backend = compat.backend(rehearsal.NAME)
    device = backend.device(0)
    backend.set_device(device)
    found: Found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        if fault:
            FAULTS[fault](monkeypatch)
        for part in parts:
            checks: list[gpu_steps.Check] = []
            error = ""
            try:
                checks = PARTS[part](backend, device)
            except Exception:
                error = traceback.format_exc()
            found[part] = checks, rehearsal.races(), error
            rehearsal.clear_races()
    return found


@pytest.fixture(scope="module")
def found() -> Callable[[tuple[str, ...]], Found]:
    """What some parts find, in one process."""

    @functools.cache
    def of(parts: tuple[str, ...]) -> Found:
        result: Found = in_fresh_processes(_checked, 1, parts, 1, None)[0]
        return result

    return of


def _right(part: str, found: Found) -> None:
    checks, races, error = found[part]
    # Inductor has no code for such a device, and says so.
    wrong = [check for check in checks if not check[1] and "InductorError" not in check[2]]
    assert checks and not wrong and not races and not error


@pytest.mark.parametrize("part", QUICK)
def test_a_check_of_accelerators_is_right(part: str, found: Callable[[tuple[str, ...]], Found]) -> None:
    _right(part, found(QUICK))


@pytest.mark.matrix
@pytest.mark.parametrize("part", SLOW)
def test_a_slow_check_of_accelerators_is_right(part: str, found: Callable[[tuple[str, ...]], Found]) -> None:
    _right(part, found(SLOW))


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    """As a race, whatever the bits are."""
    ((_, races, error),) = in_fresh_processes(_checked, 1, ("budgets",), 1, fault)[0].values()
    assert races, error
