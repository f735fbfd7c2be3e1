"""`torch.rehearsal`: an accelerator of several devices in one process, with streams that are threads.

`install()` builds it, takes PyTorch's PrivateUse1 for it and registers it with HyperParallel, once and in a process
that has not trained (`device.process.in_fresh_processes`). `races()` are accesses that no stream, event or
synchronisation puts in order, whatever came of them; `delay()` lets work fall behind at random.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from device.build import native

NAME = "rehearsal"
COLLECTIVE = "rehearsalccl"
PRIVATE_USE_1 = 20
"""`c10::DeviceType::PrivateUse1`."""


@contextlib.contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _index(device: Any = None) -> int:
    if device is None:
        return int(native().current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(native().current_device()) if index is None else int(index)


class Stream(torch.Stream):
    """The stream class of `torch.rehearsal`."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if given:  # of a stream that is there
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


def _event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    # Not a class of its own: `elapsed_time` takes no subclass of torch.Event.
    return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking)


class _Device:
    """The current device for a `with` block."""

    def __init__(self, device: Any) -> None:
        self._index, self._before = _index(device), 0

    def __enter__(self) -> None:
        self._before = native().current_device()
        native().set_device(self._index)

    def __exit__(self, *_: object) -> None:
        native().set_device(self._before)


def _manual_seed(seed: int) -> None:
    native().default_generator(_index()).manual_seed(int(seed))


def _manual_seed_all(seed: int) -> None:
    for index in range(native().device_count()):
        native().default_generator(index).manual_seed(int(seed))


def _get_rng_state(device: Any = NAME) -> torch.Tensor:
    return native().default_generator(_index(device)).get_state()


def _set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    native().default_generator(_index(device)).set_state(state)


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    held = native().memory(_index(device))
    return held["total"] - held["reserved"], held["total"]


def _module() -> ModuleType:
    own, module = native(), ModuleType(f"torch.{NAME}")
    functions = {
        "Stream": Stream,
        "Event": _event,
        "device": _Device,
        "stream": _stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=PRIVATE_USE_1
        ),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: own.synchronize(_index(device)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": own.device_count,
        "current_device": own.current_device,
        "set_device": lambda device: own.set_device(_index(device)),
        "get_device_name": lambda device=None: "Rehearsal",
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "memory_allocated": lambda device=None: own.memory(_index(device))["allocated"],
        "max_memory_allocated": lambda device=None: own.memory(_index(device))["peak"],
        "memory_reserved": lambda device=None: own.memory(_index(device))["reserved"],
        "max_memory_reserved": lambda device=None: own.memory(_index(device))["peak_reserved"],
        "reset_peak_memory_stats": lambda device=None: own.reset_peak(_index(device)),
        "mem_get_info": _mem_get_info,
        "empty_cache": lambda: own.empty_cache(own.current_device()),
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed_all,
        "seed_all": lambda: _manual_seed_all(torch.seed()),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _collectives(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    return native().collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


def install() -> ModuleType:
    """Make the device and register it; the module that PyTorch has it in."""
    from hyper_parallel.compat import TorchBackend, register

    native()
    torch.utils.rename_privateuse1_backend(NAME)
    module = _module()
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(COLLECTIVE, _collectives, devices=[NAME])
    register(NAME, lambda: TorchBackend(NAME, COLLECTIVE))
    return module


def races() -> list[str]:
    """Pairs of accesses that nothing puts in order."""
    return list(native().races())


def clear_races() -> None:
    """Forget the races so far."""
    native().clear_races()


def delay(seed: int, microseconds: int) -> None:
    """Let one piece of work in four begin late, by at most this; 0: none."""
    native().delay(seed, microseconds)


def limit(bytes: int, device: int = 0) -> None:
    """What a device has, at most."""
    native().limit(device, bytes)


def sites(named: bool) -> None:
    """Whether races name the lines that launched both sides, which takes time."""
    native().sites(named)
