"""Published machines by name, by name and number of devices, or by PyTorch's name of the device; and the peak FLOP/s of
published devices (the denominator of MFU).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from hyper_parallel.cluster.files import Tree
from hyper_parallel.cluster.presets import amd, ascend, intel, nvidia, pcie
from hyper_parallel.errors import ConfigError, nearest

_PRESETS: dict[str, Callable[[], Tree]] = {
    **nvidia.PRESETS,
    **pcie.PRESETS,
    **amd.PRESETS,
    **intel.PRESETS,
    **ascend.PRESETS,
}
_ALIASES = {**nvidia.ALIASES, **pcie.ALIASES, **ascend.ALIASES}


def names() -> list[str]:
    """The presets' names."""
    return list(_PRESETS)


def preset(name: str) -> Tree:
    """Return a published machine, its number of devices open, as plain data. Raises ConfigError for an unknown name."""
    known = _ALIASES.get(name.lower(), name.lower())
    if known not in _PRESETS:
        hint = nearest(name.lower(), [*_PRESETS, *_ALIASES])
        raise ConfigError(
            f"there is no cluster {name!r}{hint}; known are {', '.join(_PRESETS)}, each also with a number of "
            "devices as in h100x2048, and files that end in .yaml"
        )
    return _PRESETS[known]()


def is_file(name: str) -> bool:
    """Whether a cluster's name is the path of a file."""
    return name.endswith((".yaml", ".yml")) or Path(name).is_file()


def with_devices(name: str, count: int) -> str:
    """How to name a cluster with `count` devices, for the end of an error.

    >>> with_devices("h100x8", 16), with_devices("mine.yaml", 16)
    ('name h100x16', 'write devices: 16 into mine.yaml')
    """
    return (
        f"write devices: {count} into {name}" if is_file(name) else f"name {name_and_ranks(name)[0]}x{count}"
    )


def name_and_ranks(name: str) -> tuple[str, int | None]:
    """Split `h100x2048` into the preset's name and its number of devices, None if open. Raises ConfigError for 0.

    >>> name_and_ranks("h100x2048"), name_and_ranks("cloudmatrix384")
    (('h100', 2048), ('cloudmatrix384', None))
    """
    match = re.fullmatch(r"(.+)x(\d+)", name)
    # A name may itself end in what looks like a number of devices, and so may one that is meant: rtx5091.
    known = {*_PRESETS, *_ALIASES}
    if match is None or name.lower() in known:
        return name, None
    if match[1].lower() not in known and not nearest(match[1].lower(), known):
        return name, None
    if int(match[2]) < 1:
        raise ConfigError(f"a cluster has at least one device; got {name!r}")
    return match[1], int(match[2])


# Words that a device's name must hold, and the preset. The first match is taken. Whole words: an L40 is no L4.
_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("V100", "32GB"), "v100"),
    (("A100", "40GB"), "a100-40gb"),
    (("A100",), "a100"),
    (("A800",), "a800"),
    (("H100",), "h100"),
    (("H200",), "h200"),
    (("H800",), "h800"),
    (("H20",), "h20"),
    (("GB200",), "gb200-nvl72"),
    (("GB300",), "gb300-nvl72"),
    (("B200",), "b200"),
    (("B300",), "b300"),
    (("RTX", "4090"), "rtx4090"),
    (("RTX", "5090"), "rtx5090"),
    (("RTX", "6000", "Ada"), "rtx6000-ada"),
    (("L40S",), "l40s"),
    (("L4",), "l4"),
    (("A10G",), "a10g"),
    (("MI300X",), "mi300x"),
    (("MI325X",), "mi325x"),
    (("GAUDI3",), "gaudi3"),
    (("Ascend910B3",), "910b"),
)
_SLOWER = {"Laptop", "D"}
"""Words of a device's name that make it another one with other peaks, of which no preset is known."""
_EQUALS = {"float16": "bfloat16", "float8_e5m2": "float8_e4m3fn"}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of one device in `dtype`; None if no figure is published (estimates do not count).

    >>> peak_flops("NVIDIA H100 PCIe", "float16")
    756000000000000.0
    """
    for words, peaks, _ in (*nvidia.FORM_FACTORS, *ascend.FORM_FACTORS):
        if all(word in device_name for word in words):
            return peaks.get(_EQUALS.get(dtype, dtype))
    name = preset_of(device_name)
    if name is None:
        return None
    machine = preset(name)
    # A device that has no figure of a dtype's own runs it at that of its equal; a V100 has float16 and no bfloat16.
    stated = next(
        (d for d in (dtype, _EQUALS.get(dtype)) if f"device.matrix.{d}" in machine["sources"]), None
    )
    return float(machine["device"]["matrix"][stated]) if stated else None


def preset_of(device_name: str) -> str | None:
    """The preset of machines with this device; None if there is none.

    >>> preset_of("NVIDIA H100 80GB HBM3")
    'h100'
    >>> preset_of("NVIDIA GeForce RTX 4090 Laptop GPU")
    """
    device_words = set(re.split(r"[\s-]+", device_name))
    if device_words & _SLOWER:
        return None
    return next((name for words, name in _MARKS if device_words.issuperset(words)), None)
