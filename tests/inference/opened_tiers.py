"""Tiers for the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hyper_parallel.compat import backend
from hyper_parallel.offloading.tiers import FlashTier, HostTier, PoolTier, Tier

MOST = 1 << 26
"""Bytes that a tier may take."""


def opened(names: tuple[str, ...], folder: Path) -> Callable[[], Mapping[str, Tier]]:
    """Opens these tiers."""
    on = backend("cpu")
    make: dict[str, Callable[[], Tier]] = {
        "host": lambda: HostTier(on, MOST),
        "pool": lambda: PoolTier(on, MOST, f"test {folder.name}", folder=folder),
        "flash": lambda: FlashTier(folder, on, MOST),
    }
    return lambda: {name: make[name]() for name in names}
