"""Runs whose experts are placed anew: by both engines, with a checkpoint that any run goes on from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ran, run_engine
from tiny_run import metrics, run, run_config

from harness import run_ranks
from hyper_parallel.compat import inductor

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
TRAIN = {
    "steps": 8,
    "batch": 8,
    "micro_batch": 4,
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "schedule": {"name": "constant"},
    "eval": {"batches": 1, "every": 5},
    "sample": {"tokens": 4, "temperature": 0},
    "log_every": 1,
}
AXES = {"shard": 2, "expert": 2}
STAYING = {"axes": AXES, "check": False}
PLAIN: dict[str, Any] = {"model": {"config": MIXTRAL}, "train": TRAIN, "strategy": STAYING}
BALANCED = {
    **PLAIN,
    "strategy": {**STAYING, "expert_balance": {"every": 3, "limit": 1.02, "replicas": 1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("balance")


def _engine(rank: int, world: int, folder: Path, name: str, engine: str, sections: dict[str, Any]) -> Any:
    return run_engine(rank, folder, name, engine, sections)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[int, float]:
    """The losses of the same workers with experts that stay."""
    first, *_ = run_ranks(_engine, 2, folder, "plain", "graph", PLAIN)
    return first.metrics["loss"]


@pytest.fixture(scope="module")
def balanced(folder: Path) -> list[Ran]:
    """What each worker saw of the run whose experts move, by the graph."""
    return run_ranks(_engine, 2, folder, "balanced", "graph", BALANCED)


@pytest.fixture(scope="module")
def half(folder: Path) -> Path:
    """The folder of the same run, ended after four of its steps."""
    first, *_ = run_ranks(_run, 2, folder, "half", BALANCED, 4)
    assert any("experts placed anew" in note for note in first[1])
    return folder / "half-graph"


def _said(folder: Path, name: str) -> tuple[Any, dict[int, float]]:
    """The sample and the held-out losses of a run."""
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    samples = [record["sample"] for record in records if "sample" in record]
    return samples, {one["step"]: one["eval_loss"] for one in records if "eval_loss" in one}


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_losses_are_those_without_balance_and_nothing_is_captured_again(
    engine: str, folder: Path, plain: dict[int, float], balanced: list[Ran]
) -> None:
    eager = engine == "eager"
    first, *_ = run_ranks(_engine, 2, folder, "balanced", engine, BALANCED) if eager else balanced
    placed = [note for note in first.notes if "experts placed anew" in note]
    assert [note.partition(":")[0] for note in placed] == ["step 3", "step 6"][: len(placed)] and placed
    assert sum("the step as a graph" in note for note in first.notes) == (engine == "graph")
    assert first.metrics["loss"] == pytest.approx(plain, abs=1e-6)
    (sample, held_out), (expected, losses) = _said(folder, f"balanced-{engine}"), _said(folder, "plain-graph")
    assert sample == expected and len(sample) == 1
    assert held_out == pytest.approx(losses, abs=1e-6) and len(held_out) > 1
    out = folder / f"balanced-{engine}"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum(record.get("expert_bytes_moved", 0) for record in records) > 0
    uneven = [record["expert_rank_imbalance"] for record in records if "expert_rank_imbalance" in record]
    assert len(uneven) == 8 and all(1 <= one <= 2 for one in uneven)


@pytest.mark.skipif(inductor.missing() is not None, reason="no C++ compiler")
def test_compiled_layers_serve_every_placement(folder: Path, plain: dict[int, float]) -> None:
    sections = {**BALANCED, "train": {**TRAIN, "steps": 5, "compile": True}}
    first, *_ = run_ranks(_engine, 2, folder, "compiled", "graph", sections, timeout=280)
    assert any("experts placed anew" in note for note in first.notes)
    assert not any("uncompiled" in note for note in first.notes)
    # Sums in another order, as `test_compiling.FAR` has it.
    assert first.metrics["loss"] == pytest.approx({step: plain[step] for step in range(1, 6)}, rel=1e-4)


def _run(rank: int, world: int, folder: Path, name: str, sections: dict[str, Any], steps: int) -> Any:
    ran = run_engine(
        rank, folder, name, "graph", {**sections, "train": {**sections["train"], "steps": steps}}
    )
    return ran.tensors, ran.notes


def test_a_checkpoint_of_placed_experts_is_resumed_bit_for_bit(
    folder: Path, half: Path, balanced: list[Ran]
) -> None:
    shutil.copytree(half, folder / "broken-graph")
    resumed = run_ranks(_run, 2, folder, "broken", BALANCED, 8)
    assert any("resumed" in note for note in resumed[0][1])
    for whole, (again, _) in zip(balanced, resumed, strict=True):
        assert whole.tensors.keys() == again.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in whole.tensors.items())


OTHERS = {
    "none": PLAIN["strategy"],
    "other replicas": {**STAYING, "expert_balance": {"every": 2, "limit": 1.01, "replicas": 2}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_placed_experts_goes_on_under_another_strategy(
    name: str, folder: Path, half: Path, plain: dict[int, float]
) -> None:
    called = f"to-{name.replace(' ', '-')}"
    shutil.copytree(half, folder / f"{called}-graph")
    run_ranks(_run, 2, folder, called, {**BALANCED, "strategy": OTHERS[name]}, 8)
    config = run_config(folder, f"{called}-graph")
    assert metrics(config) == pytest.approx(plain, abs=1e-6)


def test_a_checkpoint_of_placed_experts_goes_on_alone(
    folder: Path, half: Path, plain: dict[int, float]
) -> None:
    shutil.copytree(half, folder / "to-one-graph")
    sections = {**PLAIN, "strategy": {}, "train": {**TRAIN, "engine": "graph"}}
    config = run_config(folder, "to-one-graph", **sections)
    assert run(config).resumed_from == 4
    # Another number of workers adds up in another order, for which a router may choose another expert later.
    assert metrics(config)[5] == pytest.approx(plain[5], abs=2e-6)
