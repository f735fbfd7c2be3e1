"""Accelerators that the machine has and PyTorch cannot use: the commonest reason of a slow first run."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.compat.registry import accelerators

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
