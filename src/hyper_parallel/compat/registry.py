"""Registry of back ends by name: the built ones, those of entry points, those that a program registers; and the
accelerators of the machine that PyTorch cannot use.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from hyper_parallel.compat.accelerator import TorchBackend
from hyper_parallel.compat.backend import Backend
from hyper_parallel.compat.cpu import CpuBackend
from hyper_parallel.errors import LaunchError, nearest

Factory = Callable[[], Backend]

GROUP = "hyper_parallel.backends"
"""Entry points of this group are factories; their names are the back ends' names."""

_factories: dict[str, Factory] = {}
_made: dict[str, Backend] = {}


def register(name: str, factory: Factory) -> None:
    """Add a back end, or replace the one of this name. The factory is called when it is first asked for."""
    _factories[name] = factory
    _made.pop(name, None)


def names() -> list[str]:
    """All the names that `backend` knows, accelerators before the CPU; none of them is imported for it."""
    found = {**{point.name: None for point in entry_points(group=GROUP)}, **dict.fromkeys(_factories)}
    return [name for name in found if name != "cpu"] + ["cpu"]


def backend(name: str = "auto", workers: int = 1) -> Backend:
    """The back end of this name; `auto` is the first accelerator with a device for each worker, or the CPU.

    `workers` counts the processes on this machine. Raises LaunchError for a name that is not known, a device
    that is not there, or fewer devices than workers.
    """
    if name == "auto":
        candidates = (_get(candidate) for candidate in names())
        return next(found for found in candidates if found.available() and found.devices_for(workers))
    if name not in names():
        hint = nearest(name, names()) or f"; known are {', '.join(names())}"
        raise LaunchError(f"there is no back end for the device {name!r}{hint}")
    found = _get(name)
    if not found.available():
        raise LaunchError(
            f"the device {name!r} was asked for, but PyTorch finds none here; install its driver and its "
            "build of PyTorch, or set launch.device=auto"
        )
    if not found.devices_for(workers):
        raise LaunchError(
            f"{workers} workers here need one {name} device each, and there are only {found.device_count()}; "
            f"start at most {found.device_count()} workers here, or set launch.device=cpu"
        )
    return found


def accelerators() -> list[Backend]:
    """The back ends other than the CPU that have a device here, in the order in which `auto` tries them."""
    return [found for found in map(_get, names()) if found.name != "cpu" and found.available()]


def _get(name: str) -> Backend:
    if name not in _made:
        factory = _factories.get(name)
        if factory is None:
            (point, *_) = entry_points(group=GROUP, name=name)
            factory = point.load()
        _made[name] = factory()
    return _made[name]


register("cuda", lambda: TorchBackend("cuda", "nccl", socket_variable="NCCL_SOCKET_IFNAME"))
register(
    "npu", lambda: TorchBackend("npu", "hccl", extension="torch_npu", socket_variable="HCCL_SOCKET_IFNAME")
)
register("cpu", CpuBackend)


# Device files by which the maker's kernel driver shows itself, the back end, and what brings it.
_FILES = (
    ("nvidia[0-9]*", "cuda", "a CUDA build of PyTorch that the installed driver supports"),
    ("davinci[0-9]*", "npu", "torch_npu and CANN, in the versions that belong to this PyTorch"),
)


def unused_accelerators(devices: Path = Path("/dev")) -> list[tuple[str, str]]:
    """Pairs of what is there but not usable, and how to mend it; from the device files of the drivers."""
    usable = {found.name for found in accelerators()}
    found = []
    for pattern, name, remedy in _FILES:
        count = len(list(devices.glob(pattern)))
        if count and name not in usable:
            found.append(
                (f"{count} {name} devices are there, but PyTorch cannot use them", f"install {remedy}")
            )
    return found
