"""`train.profile` writes what was measured, and what was predicted for a cluster that is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.train.trainer import Trainer

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SMALL = (
    "model.config.hidden_size=32", "model.config.intermediate_size=48", "model.config.num_hidden_layers=1",
    "data.sequence=32", "data.tokenizer.vocab_size=300", "train.steps=5", "train.batch=2",
    "train.schedule.warmup=0", "train.eval.every=0", "train.sample.tokens=0", "trackers=[]",
    "strategy.axes={shard: 1}", "strategy.sequence=false",
)  # fmt: skip


def test_a_measured_step_is_written_beside_its_prediction(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    Cluster.preset("h100").dump(cluster)
    data = tmp_path / "text.txt"
    data.write_text("one two three four five six seven\n" * 400)
    run = config.load(
        QUICKSTART,
        [
            *SMALL,
            f"out={tmp_path / 'run'}",
            f"data.train={data}",
            f"train.profile={{steps: 2, cluster: {cluster}}}",
        ],
    )
    Trainer(run).run()
    folder = tmp_path / "run" / "profile"
    for word in ("measured", "predicted"):
        trace = json.loads((folder / f"{word}.json").read_text())
        assert any(word in str(event) for event in trace["traceEvents"])
    text = (folder / "page.html").read_text()
    assert "measured" in text
    assert "predicted" in text


def test_the_eager_engine_cannot_be_profiled() -> None:
    with pytest.raises(ConfigError, match="set engine to graph"):
        config.load(QUICKSTART, ["train.engine=eager", "train.profile={}"])
