"""The change that `simulate --advise` names is one that the user can append, and has the figures that are stated."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyper_parallel import config
from hyper_parallel.cli.main import command
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate import predict_run
from hyper_parallel.estimate.advice import Advice, Change, advise, changes
from hyper_parallel.units import format_bytes, format_duration

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SMALL = (
    "model.config.hidden_size=256",
    "model.config.num_hidden_layers=2",
    "data.sequence=512",
    "strategy.axes={shard: 4}",
    "strategy.sequence=false",
    "train.batch=8",
    "train.micro_batch=1",
    "strategy.memory.recompute=layer",
)


def _simulate(*arguments: str) -> str:
    found = CliRunner().invoke(command, ["simulate", str(QUICKSTART), "--cluster", "h100x4", *arguments])
    assert found.exit_code == 0, found.output
    return found.output


def _run(*overrides: str) -> RunConfig:
    return config.load(QUICKSTART, (*SMALL, *overrides))


def _advised(cluster: Cluster, *overrides: str) -> Advice:
    run = _run(*overrides)
    return advise(predict_run(run, cluster), run, lambda change: _run(*overrides, *change), cluster)


def test_the_advice_appended_to_the_command_gives_the_stated_figures(tmp_path: Path) -> None:
    cache = f"data.cache={tmp_path}"
    found = json.loads(_simulate(*SMALL, cache, "--advise", "--json"))
    advice = found["advice"]
    assert advice["instead"] == found["step"]
    assert advice["step"] < 0.99 * found["step"]
    after = json.loads(_simulate(*SMALL, cache, *advice["change"], "--json"))
    assert after["step"] == advice["step"]
    assert after["memory"]["peak"] == advice["peak"]
    assert after["memory"]["fits"]
    last = re.sub(r"\s+", " ", _simulate(*SMALL, cache, "--advise").partition("helps most: ")[2]).strip()
    share = f"{advice['step'] / advice['instead'] - 1:+.0%}".replace("-", "−")
    assert last == (
        f"{shlex.join(advice['change'])}: {format_duration(advice['step'])} instead of "
        f"{format_duration(advice['instead'])} ({share}), {format_bytes(advice['peak'])}"
    )
    assert "advice" not in json.loads(_simulate(*SMALL, cache, "--json"))


def test_a_step_that_does_not_fit_is_advised_what_makes_it_fit() -> None:
    cluster = Cluster.named("h100x4")
    assert cluster.device is not None
    run = _run("strategy.memory.recompute=none")
    own = predict_run(run, cluster, as_written=True).timeline.peak.bytes
    memory = replace(cluster.device.memory, bytes=0.9 * own * cluster.device.memory.ranks)
    tight = replace(cluster, device=replace(cluster.device, memory=memory))
    found = _advised(tight, "strategy.memory.recompute=none")
    assert found.change is not None
    assert found.peak <= 0.9 * own
    assert ": it fits, " in found.text()


@pytest.mark.matrix
def test_a_pipeline_is_advised_by_the_same_figures() -> None:
    pipeline = ("strategy.axes={pipeline: 2, shard: 2}", "strategy.pipeline.schedule=gpipe")
    cluster = Cluster.named("h100x4")
    found = _advised(cluster, *pipeline)
    assert found.change is not None
    timeline = predict_run(_run(*pipeline, *found.change), cluster).timeline
    assert (timeline.step, timeline.peak.bytes) == (found.step, found.peak)
    assert found.step < found.instead


def test_where_nothing_helps_the_advice_says_so() -> None:
    run, cluster = _run(), Cluster.named("h100x4")
    own = predict_run(run, cluster)
    found = advise(own, run, lambda change: run, cluster)
    assert found.change is None
    assert found.step == own.timeline.step
    assert found.text().startswith("helps most: nothing; none of 0 single changes of the file saves 1%")


def test_changes_keep_the_number_of_devices() -> None:
    given = (
        "strategy.axes={pipeline: 2, shard: 4, tensor: 4}",
        "strategy.sequence=true",
        "train.batch=64",
    )
    offered = list(changes(_run(*given), fits=False))
    assert len(set(offered)) == len(offered)
    valid: list[Change] = []
    for change in offered:
        with contextlib.suppress(HyperParallelError):
            assert _run(*given, *change).effective_strategy.axes.world == 32
            valid.append(change)
    assert ("strategy.axes={pipeline: 2, shard: 8, tensor: 2}",) in valid
    assert ("strategy.axes={pipeline: 2, shard: 16}", "strategy.sequence=false") in valid
    assert ("strategy.axes={shard: 8, tensor: 4}", "strategy.pipeline={}") in valid
    # Copies are furthest apart, though the file does not name their axis.
    assert ("strategy.axes={replicate: 2, pipeline: 2, shard: 2, tensor: 4}",) in valid
    assert ("strategy.memory.recompute=none",) in valid
