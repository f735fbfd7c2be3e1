"""The table: columns from a workload, a cluster and a profile; rows taken and stacked."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.presets import names
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.columns import ARCHITECTURES, CODES, ORDERS, architecture, code
from hyper_parallel.planner.framework_profiles import GENERIC
from hyper_parallel.planner.table import COLUMNS, Table, of_cluster
from hyper_parallel.workload.mixers import Latent
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload
from planner.plan_cases import code_names

TINY = Shape("tiny", 2, 64, 4, 2, 16, ffn=256, gated=True, vocabulary=1000)
WORK = Workload(TINY, batch=8, sequence=128)


def table(**spread: object) -> Table:
    return Table.of(WORK, Cluster.preset("h100"), GENERIC, **spread)  # type: ignore[arg-type]


def test_columns_say_what_is_trained_on_what_and_spread_how() -> None:
    made = table(shard=[1, 2, 4], zero=3)
    assert made.n == 3
    assert (made.hidden, made.gated, made.batch, made.zero) == (64, 1, 8, 3)
    assert made.devices.tolist() == [1, 2, 4]
    assert (made.node, made.node_rate, made.peak8) == (8, 450e9, 1979e12)
    assert code_names(made, "recompute") == ["none"] * 3
    assert all(getattr(made, name).dtype == np.float64 for name in COLUMNS)


def test_latent_attention_has_columns_of_its_own() -> None:
    shape = dataclasses.replace(TINY, latent=Latent(0, 32, 16, 8, 16))
    made = Table.of(Workload(shape, 8, 128), Cluster.preset("h100"), GENERIC)
    assert (made.query_rank, made.key_rank, made.plain, made.rotary, made.value) == (0, 32, 16, 8, 16)
    assert table().key_rank == 0


def test_rows_are_taken_by_index_and_by_truth_values_and_stacked() -> None:
    made = table(shard=[1, 2, 4])
    assert made.take(1).shard.tolist() == [2]
    assert made.take(made.shard > 1).shard.tolist() == [2, 4]
    assert made.take([2, 0]).hidden.size == 1, "a column that holds for all rows stays one number"
    assert Table.stacked([made, made.take(0)]).shard.tolist() == [1, 2, 4, 1]
    assert table().take([0, 0, 0]).n == 3
    assert made.take(made.shard > 9).n == 0
    assert made.replaced(zero=[1, 2, 3]).zero.tolist() == [1, 2, 3]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        table(shard=[1, 2, 4], micro=[1, 2])
    with pytest.raises(TypeError):
        table(shards=2)


def test_every_column_is_there_once() -> None:
    assert len(COLUMNS) == len(set(COLUMNS))
    with pytest.raises(TypeError, match=r"\['hidden'\]"):
        Table(**{name: 1.0 for name in COLUMNS if name != "hidden"})


_NOT_FITTED = {*("rtx4090", "rtx5090", "rtx6000-ada", "l40s", "l4", "a10g"), *("mi300x", "mi325x", "gaudi3")}
"""Presets of devices without published runs that constants were fitted on."""


@pytest.mark.parametrize("name", names())
def test_every_preset_fills_the_machine_columns(name: str) -> None:
    columns = of_cluster(Cluster.preset(name))
    assert (ARCHITECTURES[int(columns["architecture"])] == "other") == (name in _NOT_FITTED)
    assert columns["peak16"] <= columns["peak8"] <= columns["peak4"]
    assert columns["node_rate"] >= columns["supernode_rate"] >= columns["network_rate"] > 0


def test_a_cluster_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="section `device`"):
        of_cluster(Cluster(node=4))


def test_codes_and_architectures() -> None:
    assert CODES["recompute"][code("recompute", "full")] == "full"
    assert all(sorted(order) == sorted(ORDERS[0]) for order in ORDERS)
    assert architecture("Some NPU") == "other"


def test_the_planner_is_imported_without_torch() -> None:
    text = "import sys, hyper_parallel.planner.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text]).returncode == 0
