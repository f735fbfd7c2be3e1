"""Machines by name: a preset, a preset with a number of devices, or a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hyper_parallel.cluster.cluster import Cluster
from hyper_parallel.cluster.presets import amd, ascend, nvidia
from hyper_parallel.errors import ConfigError, nearest

_PRESETS: dict[str, Callable[[], Cluster]] = {**nvidia.PRESETS, **amd.PRESETS, **ascend.PRESETS}
_ALIASES = {**nvidia.ALIASES, **ascend.ALIASES}


def names() -> list[str]:
    """The presets' names."""
    return list(_PRESETS)


def preset(name: str) -> Cluster:
    """A published machine with an open number of devices. Raises ConfigError for an unknown name."""
    known = _ALIASES.get(name.lower(), name.lower())
    if known not in _PRESETS:
        hint = nearest(name.lower(), [*_PRESETS, *_ALIASES])
        raise ConfigError(
            f"there is no cluster {name!r}{hint}; known are {', '.join(_PRESETS)}, each also with a number of "
            "devices as in h100x2048, and files that end in .yaml"
        )
    return _PRESETS[known]()


def named(name: str) -> Cluster:
    """The cluster for `h100x2048`, `h100`, or a file's path. Raises ConfigError for an unknown name."""
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return Cluster.load(name)
    match = re.fullmatch(r"(.+)x(\d+)", name)
    # A name may itself end in what looks like a number of devices: cloudmatrix384.
    if match is None or name.lower() in _ALIASES or name.lower() in _PRESETS:
        return preset(name)
    if int(match[2]) < 1:
        raise ConfigError(f"a cluster has at least one device; got {name!r}")
    return replace(preset(match[1]), name=name.lower(), ranks=int(match[2]))
