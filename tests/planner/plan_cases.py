"""Small models on small machines, whose spaces can be listed point by point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.columns import CODES, Columns, taken
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.space import StrategySpace
from hyper_parallel.planner.table import SPREAD, Table
from hyper_parallel.workload.mixers import LayerMix, Mixer
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Adapter, Workload

DENSE = Shape("dense", 6, 2048, 16, 4, 128, ffn=8192, gated=True, vocabulary=64000)
ROUTED = {"experts": 8, "chosen": 2, "expert_ffn": 4096, "shared_ffn": 2048, "dense_layers": 1}
EXPERTS = replace(DENSE, name="experts", layers=5, **ROUTED)
MAMBA = Mixer(
    kind="mamba2",
    inputs=4096 + 4608 + 64,
    inner=4096,
    channels=4608,
    kernel=4,
    heads=64,
    key=64,
    value=64,
    groups=4,
    chunk=128,
)
HYBRID = replace(DENSE, name="hybrid", mix=LayerMix(mixer=MAMBA, mixing=4, attending=2, feeding=6, norms=12))
BLOCKS = replace(
    EXPERTS,
    name="blocks",
    layers=6,
    dense_layers=0,
    mix=LayerMix(mixer=MAMBA, mixing=2, attending=1, feeding=3, norms=6),
)
"""Layers with either a token mixer or experts."""


def cluster(gib: float, slower: float = 1, host_gib: float | None = None) -> Cluster:
    """Small nodes of devices with `gib` GiB, links that are `slower`, and `host_gib` GiB of a host for each."""
    h100 = Cluster.named("h100")
    assert h100.device
    memory = replace(h100.device.memory, bytes=gib * 2**30)
    links = {name: replace(link, bandwidth=link.bandwidth / slower) for name, link in h100.links.items()}
    assert h100.host
    host = h100.host if host_gib is None else replace(h100.host, bytes=host_gib * 2**30 * h100.host.ranks)
    return replace(h100, node=4, host=host, device=replace(h100.device, memory=memory), links=links)


def question(
    model: Shape = DENSE,
    gib: float = 80.0,
    devices: int = 8,
    slower: float = 1,
    host_gib: float | None = None,
    adapter: Adapter | None = None,
    prediction_modules: int = 0,
    **options: Any,
) -> Question:
    """A question of few points."""
    work = Workload(model, batch=16, sequence=4096, adapter=adapter, prediction_modules=prediction_modules)
    return Question(workload=work, cluster=cluster(gib, slower, host_gib), devices=devices, **options)


def base(asked: Question) -> Table:
    """What all strategies of a question have in common."""
    return Table.of(asked.workload, asked.cluster, asked.profile, devices=float(asked.devices))


def groups(asked: Question) -> Columns:
    """All strategies that lack what is computed again and moved."""
    space = StrategySpace(asked)
    rows = space.degrees()
    for level in (space.micro, space.dual, space.splits, space.orders, space.schedules):
        rows, _ = level.expand(rows)
    return rows


def listed(asked: Question) -> Iterator[Table]:
    """Every point of a space."""
    space, common, rows = StrategySpace(asked), base(asked), groups(asked)
    for start in range(0, rows["micro"].size, 20000):
        for ways in space.kept(taken(rows, slice(start, start + 20000))):
            yield common.replaced(**{name: ways[name] for name in SPREAD})


def code_names(table: Table, column: str) -> list[Any]:
    """What a column's codes stand for, one for each row."""
    return [CODES[column][int(code)] for code in np.broadcast_to(getattr(table, column), table.n)]
