"""Runs on the rehearsal device, whose work falls behind at random: what they compute is what the CPU computes, and each
access of memory waits for those before it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device import rehearsal
from device.build import missing
from device.process import in_fresh_processes
from hyper_parallel import compat
from hyper_parallel.launch import Worker
from hyper_parallel.train.trainer import Trainer
from train.tiny_run import metrics, run_config

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LATE = 300
"""Microseconds by which work begins late, at most."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "eager": (1, {"train": {"engine": "eager"}}),
    "graph": (1, {"train": {"engine": "graph"}}),
    "accumulation": (1, {"train": {"engine": "graph", "micro_batch": 2}}),
    "recomputed layers": (1, {"strategy": {"version": 1, "memory": {"recompute": "layer"}}}),
    "a budget": (
        1,
        {
            "train": {"engine": "graph"},
            "strategy": {"version": 1, "memory": {"device": "700KiB", "host": "64MiB"}},
        },
    ),
    "checkpoints": (1, {"checkpoint": {"every": 2}}),
    "shards": (2, {"strategy": {"version": 1, "axes": {"shard": 2}}}),
    "tensor": (2, {"strategy": {"version": 1, "axes": {"tensor": 2}}}),
    "shards, graph": (2, {"train": {"engine": "graph"}, "strategy": {"version": 1, "axes": {"shard": 2}}}),
    "a pipeline": (
        2,
        {
            "train": {"engine": "graph", "micro_batch": 2},
            "strategy": {"version": 1, "axes": {"pipeline": 2}},
        },
    ),
}


def _trained(
    rank: int, world: int, folder: Path, cases: tuple[str, ...], kind: str, seed: int
) -> dict[str, tuple[dict[int, float], list[str]]]:
    """The losses of runs on a kind of device, and their races."""
    if kind != "cpu":
        rehearsal.install()
        rehearsal.sites(True)
        rehearsal.delay(seed + rank, LATE)
    backend = compat.backend(kind)
    device = backend.device(rank) if kind != "cpu" else torch.device("cpu")
    backend.set_device(device)
    found = {}
    for case in cases:
        store = dist.FileStore(str(folder / f"{kind} meets for {case}"), world)
        dist.init_process_group(
            backend.process_group, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        name = f"{case} {kind}".replace(" ", "-").replace(",", "")
        config = run_config(folder, name, **CASES[case][1])
        Trainer(config).run(Worker(rank, rank, world, world, device, backend))
        found[case] = metrics(config), rehearsal.races() if kind != "cpu" else []
        if kind != "cpu":
            rehearsal.clear_races()
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[Any]]:
    """What the ranks of all cases of a world found on a kind of device, from one start of them."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def of(world: int, kind: str) -> list[Any]:
        cases = tuple(case for case, (ranks, _) in CASES.items() if ranks == world)
        return in_fresh_processes(_trained, world, folder, cases, kind, 1)

    return of


@pytest.mark.parametrize("case", CASES)
def test_a_run_computes_what_the_cpu_computes(case: str, trained: Callable[[int, str], list[Any]]) -> None:
    """Losses of six steps within 1e-6: PyTorch composes some operators for a device that have kernels of the CPU."""
    world = CASES[case][0]
    expected, _ = trained(world, "cpu")[0][case]
    assert len(expected) == 6
    for rank in trained(world, rehearsal.NAME):
        losses, races = rank[case]
        assert races == []
        assert losses == pytest.approx(expected, rel=1e-6)
