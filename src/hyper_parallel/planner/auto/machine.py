"""The machine that a run is planned for: named in the file, the device's preset, or this one, measured once.

What is measured is kept beside other caches of the user (`$XDG_CACHE_HOME/hyper-parallel/clusters`, else under
`~/.cache`), by host, cores, PyTorch, number of workers and `FORM`; who deletes the file has it measured again.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hyper_parallel.calibrate import Settings, calibrate
from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.presets import preset_of
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError, HyperParallelError
from hyper_parallel.launch import Worker

Say = Callable[[str], None]

FORM = 2
"""Counts up when what is measured, or how collectives run, is not what it was: older measurements are made anew."""


def machine_of(config: RunConfig, worker: Worker, say: Say) -> Cluster:
    """The cluster that a run's workers are on, as so many of them see it. `say` is told what takes its time.

    Raises ConfigError for a cluster that is not known, has no device, or is too small, and for a device of which
    nothing is known.
    """
    name = config.strategy.cluster
    if name is not None:
        return named(name, worker.world, "strategy.cluster")
    known = preset_of(worker.backend.device_name())
    if known is not None:
        return replace(Cluster.preset(known), node=worker.local_world, ranks=worker.world)
    if worker.backend.name != "cpu":
        raise ConfigError(
            f"strategy: auto needs to know the machine, and there is no preset for {worker.backend.device_name()}; "
            "measure it with hyper-parallel calibrate and set strategy.cluster to the file, or write the axes"
        )
    if worker.world != worker.local_world:
        raise ConfigError(
            "strategy: auto measures one machine, and these workers are on several whose links are not known; "
            "describe them in a cluster file and set strategy.cluster to it, or write the axes"
        )
    return measured(worker.world, say)


def named(name: str, world: int, key: str) -> Cluster:
    """A preset or a file for so many workers; `key` is what named it.

    Raises ConfigError for one that is not known, too small, or says nothing of its devices.
    """
    found = Cluster.named(name)
    if found.ranks is not None and not found.shared and found.ranks < world:
        raise ConfigError(f"{key}: {name} has {found.ranks} devices, and there are {world} workers")
    seen = found.for_workers(world)
    if seen.device is None or (world > 1 and not seen.links and not seen.collectives):
        lacks = "device" if seen.device is None else "link between devices"
        raise ConfigError(f"{key}: {name} describes no {lacks}, without which nothing can be planned")
    return replace(seen, name=seen.name or name, ranks=world)


def measured(world: int, say: Say, measure: Callable[[Settings, Say], Cluster] = calibrate) -> Cluster:
    """This machine for so many workers: as it was measured before, else measured now."""
    file = _file(world)
    if file.is_file():
        try:
            found = Cluster.load(file)
        except HyperParallelError:
            say(f"{file} cannot be read and is measured again")
        else:
            say(f"this machine as measured before ({file}; delete it to measure again)")
            return replace(found.for_workers(world), ranks=world)
    say(f"measuring this machine for {world} workers, once: about a minute")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Settings(workers=world, level="quick", device="cpu", folder=Path(folder)), lambda _: None
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        found.dump(file)
        kept = f"kept in {file}"
    except OSError as error:
        kept = f"not kept: {file}: {error.strerror}"
    say(f"measured in {time.monotonic() - begun:.0f} s; {kept}")
    return replace(found.for_workers(world), ranks=world)


def _file(world: int) -> Path:
    """Where the measurement for so many workers is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    key = f"{platform.node()}-{cores}-cores-torch-{torch.__version__}-{world}-workers-{FORM}"
    return cache / "hyper-parallel" / "clusters" / f"{re.sub(r'[^A-Za-z0-9.+-]', '_', key)}.yaml"
