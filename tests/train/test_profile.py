"""`train.profile` writes what was measured, and what was predicted for a cluster that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import run, run_config

from harness import run_ranks
from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.runtime.graph_interpreter import positions
from hyper_parallel.step.build import build
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


def _traced(rank: int, world: int, folder: Path, memory: dict[str, str]) -> tuple[list[str], dict[str, Any]]:
    """The instructions of this rank's Program, and the trace of a run."""
    sections: dict[str, Any] = {
        "strategy": {"axes": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}, "memory": memory},
        "train": {"steps": 4, "profile": {"steps": 1}, "sample": False},
    }
    run_file = run_config(folder, **sections)
    summary = run(run_file)
    assert summary.profile == [str(folder / "run/profile" / f"rank-{one}.json") for one in range(world)]
    pipeline = build(run_file).pipeline
    assert pipeline is not None and pipeline.plan.program is not None
    program = pipeline.plan.program
    names = [one.text for one in positions(program, pipeline.place.groups[rank].name)]
    return names, json.loads(Path(summary.profile[rank]).read_text())


@pytest.mark.parametrize("memory", [{}, {"device": "1MiB", "host": "64MiB"}], ids=["plain", "budget"])
def test_each_rank_of_a_pipeline_has_a_trace_with_its_instructions(
    tmp_path: Path, memory: dict[str, str]
) -> None:
    for names, trace in run_ranks(_traced, 2, tmp_path, memory):
        ranges = [one for one in trace["traceEvents"] if one.get("cat") == "user_annotation"]
        ranges.sort(key=lambda one: one["ts"])
        [step] = [one for one in ranges if one["name"].startswith("step ")]
        assert step["name"] == "step 3"
        marks = [one for one in ranges if one["name"] in names]
        assert all(
            step["ts"] <= one["ts"] <= one["ts"] + one["dur"] <= step["ts"] + step["dur"] for one in marks
        )
        found = [one["name"] for one in marks]
        assert list(dict.fromkeys(found)) == names
        # Gradients of weights, which follow behind what a backward pass sends, are its own.
        backward = [name for name in found if "Run(backward" in name]
        assert memory or len(backward) == 2 * len(set(backward)) > 0


def test_traces_are_not_compared_with_a_prediction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'train\.profile\.cluster' compares"):
        config.from_dict(
            {
                **run_config(tmp_path).model_dump(mode="json"),
                "strategy": {"axes": {"pipeline": 2}},
                "train": {"profile": {"cluster": "h100"}},
            }
        )
