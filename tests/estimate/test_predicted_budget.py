"""A step under a memory budget on a cluster that is not there: what is predicted and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError, ConfigError
from hyper_parallel.estimate import predict_run

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SMALL = ("model.config.hidden_size=64", "model.config.num_hidden_layers=2", "data.sequence=64")
BUDGET = ("strategy.memory.device=6MiB", "strategy.memory.host=1GiB")


def test_a_budget_is_met_and_its_copies_are_simulated() -> None:
    cluster = Cluster.preset("h100")
    free = predict_run(config.load(QUICKSTART, SMALL), cluster)
    within = predict_run(config.load(QUICKSTART, (*SMALL, *BUDGET)), cluster)
    assert free.timeline.peak.bytes > 6 * 2**20 >= within.timeline.peak.bytes
    assert within.timeline.step > free.timeline.step
    assert {"copy:device>host", "copy:host>device"} <= {span.engine for span in within.timeline.spans}
    assert "host" in within.timeline.trace.tiers
    assert any("memory: " in note and "6.0 MiB" in note for note in within.notes)


def test_what_moves_is_explained() -> None:
    found = predict_run(config.load(QUICKSTART, (*SMALL, *BUDGET)), Cluster.preset("h100"), explain=True)
    said = "\n".join(found.notes)
    assert "no plan needs less than" in said
    assert "optimizer of the next step" in said
    with pytest.raises(ConfigError, match="set one, for example"):
        predict_run(config.load(QUICKSTART, SMALL), Cluster.preset("h100"), explain=True)


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (("strategy.memory.device=1KiB", "strategy.memory.host=1GiB"), "at least [0-9,]+ bytes"),
        (("strategy.memory.device=3MiB", "strategy.memory.pool=1GiB"), "describes no pool"),
        (("strategy.memory.device=3MiB", "strategy.memory.host=1000000GiB"), "ask for less"),
    ],
)
def test_what_cannot_be_met_is_told(memory: tuple[str, ...], said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        predict_run(config.load(QUICKSTART, (*SMALL, *memory)), Cluster.preset("h100"))


def test_devices_that_share_a_tier_share_its_bandwidth() -> None:
    cluster = Cluster.preset("h100")
    alone, all_of_a_node = (cluster.copy_seconds("device", "flash", 1e9, ranks) for ranks in (1, 8))
    assert all_of_a_node > 4 * alone
    assert cluster.copy_seconds("device", "host", 1e9, 8) == pytest.approx(
        cluster.copy_seconds("device", "host", 1e9), rel=1e-6
    )


def test_memory_for_more_rows_of_experts_is_predicted_and_told() -> None:
    experts = (
        "model.config.model_type=mixtral",
        "model.config.num_local_experts=4",
        "strategy.axes={shard: 2, expert: 2}",
        "strategy.sequence=false",
        "train.batch=2",
        "model.config.num_hidden_layers=1",
        "strategy.memory.device=1GiB",
        "strategy.memory.host=1GiB",
    )
    peaks = {}
    for load in (1.5, 9.0):
        keys = (*SMALL, *experts, f"strategy.memory.expert_load={load}")
        found = predict_run(config.load(QUICKSTART, keys), Cluster.preset("h100"))
        peaks[load] = found.timeline.peak.bytes
        said = "\n".join(found.notes)
        # No more than all rows of the two ranks come to one.
        assert f"get {min(load, 2.0):g} times their even share" in said
    assert peaks[1.5] < peaks[9.0]
