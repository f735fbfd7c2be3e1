"""A planned strategy becomes a run file that loads, and a run file becomes the same columns again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.columns import code
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import MemoryBudget, memory_budget, planned_run_file, user_strategy
from hyper_parallel.planner.table import SPREAD, Table
from hyper_parallel.strategy import recomputed_layers
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload


def _question(name: str = "llama-3-8b", cluster: str = "h100x64", **more: Any) -> Question:
    return Question(workload=Workload(shape(name), 128, 8192, **more), cluster=Cluster.named(cluster))


def _figures(question: Question, **spread: float) -> Figures:
    table = Table.of(question.workload, question.cluster, question.profile, **spread)
    return figures(table, estimate(table, Constants()))[0]


RUNS: dict[str, dict[str, float]] = {
    "zero": {"replicate": 8, "shard": 8, "zero": 2, "micro": 2},
    "tensor": {"shard": 8, "tensor_x": 8, "zero": 1, "sequence_parallel": 1, "recompute": 2},
    "two": {"shard": 8, "tensor_x": 4, "tensor_y": 2, "zero": 3, "sequence_parallel": 1},
    "context": {"shard": 4, "context": 4, "tensor_x": 4, "zero": 3, "method": code("method", "ring")},
    "order": {"shard": 16, "tensor_x": 4, "zero": 3, "order": 4},
}


@pytest.mark.parametrize("name", RUNS)
def test_it_loads_and_reads_back(name: str, tmp_path: Path) -> None:
    question = _question()
    made = planned_run_file(_figures(question, **RUNS[name]), question)
    file = tmp_path / "run.yaml"
    file.write_text(made.text)
    run = config.load(file)
    assert run.strategy.axes.world == 64
    assert run.train.batch == 128
    assert run.strategy.precision.compute == "bfloat16"
    notes: list[str] = []
    assert user_strategy(file, question, notes) == {**SPREAD, **RUNS[name]}
    assert notes == []


def test_the_head_says_that_it_is_an_estimate() -> None:
    question = _question()
    found = _figures(question, shard=64, zero=3)
    head = [line for line in planned_run_file(found, question).text.splitlines() if line.startswith("#")]
    assert "llama-3-8b on 64 devices of h100x64" in head[0]
    assert head[1].startswith("# Estimated: a step in ")


def test_experts_keep_their_axis() -> None:
    question = _question("mixtral-8x7b")
    data = planned_run_file(_figures(question, shard=64, expert=8, zero=3), question).data
    assert data["strategy"]["axes"] == {"shard": 64, "expert": 8}
    assert config.from_dict(data).strategy.axes.expert == 8


def test_a_pipeline_is_written_as_train_runs_it(tmp_path: Path) -> None:
    question = _question()
    spread = {"shard": 8, "pipeline": 8, "zero": 1, "virtual": 2, "schedule": code("schedule", "interleaved")}
    made = planned_run_file(_figures(question, **spread), question)
    assert not any("pipeline" in note for note in made.notes)
    file = tmp_path / "run.yaml"
    file.write_text(made.text)
    assert config.load(file).strategy.axes.pipeline == 8
    assert user_strategy(file, question, []) == {**SPREAD, **spread}


def test_what_lies_on_the_host_is_a_budget() -> None:
    question = _question()
    found = _figures(question, shard=64, zero=3, state_on_host=1)
    run = config.from_dict(
        planned_run_file(found, question, budget=MemoryBudget(3 << 30, 2 << 30, 1 << 30)).data
    )
    memory = run.strategy.memory
    assert (memory.device, memory.host, memory.pool) == (3 << 30, 2 << 30, 64 << 30)
    assert (run.train.engine, memory.recompute) == ("graph", "auto")


def test_a_budget_is_what_a_machine_has_less_a_margin() -> None:
    h100 = Cluster.named("h100")
    found = memory_budget(h100, Constants())
    assert h100.device is not None and h100.host is not None
    assert found.device * Constants().slack + Constants().outside == pytest.approx(h100.device.memory.bytes)
    assert found.host == int(0.8 * h100.host.bytes / h100.host.ranks) and found.pool == 0


def test_a_pool_is_used_beyond_the_host_and_holds_what_the_estimate_says() -> None:
    a5 = Cluster.named("atlas950")
    needed = 0.81 * a5.tier("host").bytes / a5.tier("host").ranks
    small, large = memory_budget(a5, Constants()), memory_budget(a5, Constants(), needed)
    assert small.pool == 0
    table = Table.of(_question().workload, a5, _question().profile)
    assert large.host + large.pool <= 0.8 * float(table.host_bytes[0])


def test_what_train_cannot_say_is_noted() -> None:
    question = _question(precision="fp8")
    found = _figures(question, shard=64, zero=3, recompute=2, recomputed=0.5)
    made = planned_run_file(found, question)
    assert "fp8" in " ".join(made.notes)
    assert made.data["strategy"]["memory"]["recompute_layers"] == 16


STAGES = {"pipeline": 8, "shard": 8, "zero": 1, "schedule": code("schedule", "interleaved")}


@pytest.mark.parametrize(
    ("spread", "written"),
    [
        ({"shard": 64, "zero": 3, "recomputed": 3 / 32}, 3),
        ({"pipeline": 8, "shard": 8, "zero": 1, "recomputed": 3 / 4}, 3),
        # Three of a rank's four layers, which are two stages: the first eight stages have one more.
        ({**STAGES, "virtual": 2, "recomputed": 3 / 4}, [2] * 8 + [1] * 8),
    ],
)
def test_layers_that_are_recomputed_are_written_and_read_back(
    spread: dict[str, float], written: int | list[int], tmp_path: Path
) -> None:
    question = _question()
    made = planned_run_file(_figures(question, recompute=2, **spread), question)
    assert made.data["strategy"]["memory"]["recompute_layers"] == written
    file = tmp_path / "run.yaml"
    file.write_text(made.text)
    run = config.load(file)
    stages = len(written) if isinstance(written, list) else run.strategy.axes.pipeline
    layers = recomputed_layers(run.strategy.memory, [32 // stages] * stages)
    assert len(layers) == spread["recomputed"] * 32
    assert user_strategy(file, question, [])["recomputed"] == pytest.approx(spread["recomputed"])


def test_selective_recompute_is_written_and_read_back(tmp_path: Path) -> None:
    question = _question()
    made = planned_run_file(_figures(question, shard=64, zero=3, recompute=1), question)
    file = tmp_path / "run.yaml"
    file.write_text(made.text)
    assert config.load(file).strategy.memory.recompute == "selective"
    assert user_strategy(file, question, [])["recompute"] == 1


def test_a_known_model_is_written_as_it_was_given() -> None:
    question = _question()
    section = {"config": {"model_type": "llama", "hidden_size": 4096}}
    assert planned_run_file(_figures(question, shard=64, zero=3), question, section).data["model"] == section


def test_a_strategy_with_a_pipeline_is_read(tmp_path: Path) -> None:
    file = tmp_path / "strategy.yaml"
    file.write_text("version: 1\naxes: {shard: 8, pipeline: 8}\npipeline: {schedule: zb-h1}\n")
    notes: list[str] = []
    found = user_strategy(file, _question(), notes)
    assert (found["pipeline"], found["schedule"], found["micro"]) == (8, code("schedule", "zb-h1"), 1)
    assert "micro-batches" in notes[0]


def test_a_schedule_that_the_estimate_does_not_know_is_told(tmp_path: Path) -> None:
    file = tmp_path / "strategy.yaml"
    file.write_text(
        "version: 1\naxes: {pipeline: 8, shard: 8}\npipeline: {schedule: v-min, layers: [2, 30]}\n"
    )
    notes: list[str] = []
    found = user_strategy(file, _question(), notes)
    assert (found["schedule"], found["virtual"]) == (code("schedule", "zb-v"), 2)
    assert any("schedule v-min is estimated as zb-v" in note for note in notes)
    assert any("pipeline.layers is left out" in note for note in notes)


def test_columns_alone_are_a_strategy(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("tensor: 8\nshard: 8\nzero: 1\nrecompute: full\n")
    assert user_strategy(file, _question(), []) == {
        **SPREAD,
        "tensor_x": 8,
        "shard": 8,
        "zero": 1,
        "recompute": 2,
    }


def test_another_batch_is_told(tmp_path: Path) -> None:
    question = _question()
    file = tmp_path / "run.yaml"
    text = planned_run_file(_figures(question, shard=64, zero=3), question).text
    file.write_text(text.replace("batch: 128", "batch: 256", 1))
    notes: list[str] = []
    user_strategy(file, question, notes)
    assert len(notes) == 1
    assert "256 × 8,192" in notes[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tensor_x: 8\n", "multiply to 8, and the question is of 64"),
        ("tensor_z: 8\n", "named 'tensor_z'"),
        ("- 1\n", "must be a run file"),
        ("schedule: 1f2b\nshard: 64\n", "did you mean '1f1b'"),
        ("version: 1\naxes: {pipeline: 8, shrad: 8}\n", "shrad"),
        ("version: 1\naxes: {pipeline: 8, shard: 8}\npipeline: {schedule: 1f2b}\n", "did you mean '1f1b'"),
        ("version: 1\naxes: 8\n", "axes"),
        ("version: 1\nstrategy: 8\n", "strategy"),
    ],
)
def test_what_is_no_strategy_is_told(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        user_strategy(file, _question(), [])


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        user_strategy(tmp_path / "none.yaml", _question(), [])


def test_a_planned_budget_is_kept_by_the_step_that_train_runs() -> None:
    from hyper_parallel.estimate import predict_run

    dims = {
        "hidden": 256,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 32,
        "ffn": 768,
        "vocabulary": 2048,
        "layers": 4,
    }
    work = Workload(replace(shape("llama-3-8b"), **dims), 8, 128, "fp32")
    question = Question(workload=work, cluster=Cluster.named("h100x2"), runnable=True)
    found = _figures(question, shard=2, zero=3, micro=4, state_on_host=1)
    made = planned_run_file(found, question, budget=MemoryBudget(56 << 20, 256 << 20))
    free = planned_run_file(_figures(question, shard=2, zero=3, micro=4), question)
    cluster = question.cluster.for_workers(2)
    kept, whole = (
        predict_run(config.from_dict(one.data), cluster).timeline.peak.bytes for one in (made, free)
    )
    assert kept <= 56 << 20 < whole
