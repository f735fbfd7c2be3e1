"""From a run file to a prediction, and what a user is told who asks for what cannot be."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyper_parallel import config
from hyper_parallel.cli.main import command
from hyper_parallel.cluster import MEASURED, Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate import cluster_of, predict_run
from hyper_parallel.estimate.prediction import Prediction
from hyper_parallel.trace.simulated_error import simulated_between
from hyper_parallel.units import format_duration, format_interval

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SMALL = ("model.config.hidden_size=64", "model.config.num_hidden_layers=2", "data.sequence=64")


def _run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(command, ["simulate", str(QUICKSTART), *SMALL, *arguments])
    return found.exit_code, found.output if found.exception is None else str(found.exception)


@functools.cache
def _predicted() -> Prediction:
    return predict_run(config.load(QUICKSTART, SMALL), Cluster.preset("h100"))


def test_the_command_tells_time_and_memory_and_writes_what_is_asked_for(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    code, said = _run("--cluster", "h100x4", "--ranks", "4", "--trace", str(trace), "--html", str(page))
    assert code == 0
    assert said.startswith("simulated: a step takes ")
    assert "predicted step of 4 ranks on h100x4" in said
    assert "simulated: " in said
    assert "it fits: predicted peak" in said
    assert "next: --advise" in said and "helps most:" not in said
    assert "collectives by axis" in said
    assert json.loads(trace.read_text())["traceEvents"]
    assert "predicted" in page.read_text()


def test_json_has_the_same_numbers() -> None:
    code, said = _run("--cluster", "910b", "--json")
    assert code == 0, said
    found = json.loads(said)
    assert found["predicted"] is True
    assert found["ranks"] == 4
    assert found["interval"] == list(simulated_between(found["step"], mixture=False))
    assert found["memory"]["fits"] is True
    assert found["memory"]["peak"] == sum(found["memory"]["by_kind"].values())
    assert found["step"] == pytest.approx(
        found["computing"] + found["exposed"] + sum(found["waiting"].values())
    )
    assert found["tokens_per_second_per_device"] == pytest.approx(found["tokens"] / found["step"] / 4)


@pytest.mark.parametrize("experts", [0, 4])
def test_the_interval_is_that_of_the_models_kind(experts: int) -> None:
    """Mixtures of experts are harder to predict, and `plan` states the same interval (`Solved.shown`)."""
    overrides = (*SMALL, "strategy.axes={shard: 2}", "strategy.sequence=false")
    if experts:
        overrides += ("model.config.model_type=mixtral", f"model.config.num_local_experts={experts}")
    found = predict_run(config.load(QUICKSTART, overrides), Cluster.preset("h100"))
    step = found.timeline.step
    low, high = found.between
    assert low < step < high
    assert (low, high) == simulated_between(step, mixture=bool(experts))
    assert (low, high) != simulated_between(step, mixture=not experts)
    assert (
        f"predicted {format_duration(step)} a step (90%: {format_interval(step, (low, high))})"
        in found.text(10_000)
    )


def test_model_flops_are_those_of_the_one_convention() -> None:
    found = _predicted()
    layers, hidden, inner, vocabulary = 2, 64, 704, 4096
    matrices = (
        layers * (hidden * hidden * 2 + 2 * hidden * hidden // 2 + 3 * hidden * inner) + hidden * vocabulary
    )
    keys = 64 / 2
    per_token = 6 * matrices + 12 * layers * hidden * keys
    trace = found.timeline.trace
    assert trace.model_flops == pytest.approx(per_token * found.tokens)
    assert found.timeline.mfu == pytest.approx(
        trace.model_flops / found.timeline.step / 4 / 66.9e12, rel=2e-2
    )


def test_collectives_are_in_the_order_of_training_unless_asked_otherwise() -> None:
    cluster = Cluster.preset("h100")
    plain = predict_run(config.load(QUICKSTART, SMALL), cluster, as_written=True)
    assert any("--as-written" in note for note in plain.notes)
    assert plain.timeline.masked.blocked == pytest.approx(0.0)
    ordered = _predicted()
    assert not any("--as-written" in note for note in ordered.notes)
    assert ordered.timeline.step < plain.timeline.step and ordered.timeline.masked.blocked > 0.2
    # A run that asks for no order has none.
    none = predict_run(config.load(QUICKSTART, (*SMALL, "strategy.overlap.schedule=none")), cluster)
    assert none.timeline.step == pytest.approx(plain.timeline.step)
    # On the machine that was measured, training takes the usual order unless a file names the cluster.
    usual = predict_run(config.load(QUICKSTART, SMALL), replace(cluster, name=MEASURED))
    assert ordered.timeline.step < usual.timeline.step < plain.timeline.step


def test_more_memory_than_there_is_names_the_keys_that_help() -> None:
    run = config.load(QUICKSTART, SMALL)
    machine = Cluster.preset("h100")
    assert machine.device is not None
    small = replace(machine, device=replace(machine.device, memory=replace(machine.device.memory, bytes=1e6)))
    found = predict_run(run, small)
    assert found.fits is False
    assert "IT DOES NOT FIT" in found.text()
    assert any("train.micro_batch" in remedy for remedy in found.remedies)
    alone = predict_run(config.load(QUICKSTART, (*SMALL, "train.micro_batch=1")), small)
    assert alone.fits is False
    assert not any("train.micro_batch" in remedy for remedy in alone.remedies)


@pytest.mark.parametrize(
    ("cluster", "ranks", "told"),
    [
        ("h10", None, "did you mean 'h100'"),
        ("h100x2", None, "name h100x4"),
        ("h100", 8, "strategy.axes.shard=4 or strategy.axes.replicate=2"),
        ("h100", 6, "strategy.axes.shard=3"),
        ("h100", 7, "choose degrees that multiply to 7"),
    ],
)
def test_what_cannot_be_is_told_with_what_can(cluster: str, ranks: int | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        cluster_of(cluster, config.load(QUICKSTART, SMALL), ranks)


def test_a_folder_that_is_not_there_is_told_before_the_work(tmp_path: Path) -> None:
    code, said = _run("--cluster", "h100", "--html", str(tmp_path / "none" / "page.html"))
    assert code == 1
    assert "create it first" in said
