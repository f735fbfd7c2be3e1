"""Runs under a memory budget against runs without: every loss, norm, parameter and moment, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ran, differences, few, of_graph, packed_text, run_engine
from tiny_run import LLAMA, metrics, run, run_config
from transformers import LlamaConfig, LlamaForCausalLM

from harness import run_ranks
from hyper_parallel.compat import memory as paged_out_parameters
from hyper_parallel.data import PackedText
from hyper_parallel.errors import BudgetError, CaptureError, NonFiniteError
from hyper_parallel.step import graph_cache
from hyper_parallel.step.capture_train_step import capture_one

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MOE = {**LLAMA, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 8},
    "mixtral": {**MOE, "model_type": "mixtral", "intermediate_size": 24, "num_local_experts": 4},
    "qwen3-moe": {
        **MOE,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 16,
    },
}
QUICK = ("llama", "gpt2")
"""Families that are looked at in every run of the tests."""
TIERS = {
    "host": {"host": "64MiB"},
    "flash": {"flash": "spill"},
    "both": {"host": "200KiB", "flash": "spill"},
    "pool": {"pool": "64MiB"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budgets")


def _with_budget(folder: Path, sections: dict[str, Any], device: int | str, tiers: str) -> dict[str, Any]:
    memory = {"device": device, **TIERS[tiers]}
    if "flash" in memory:
        memory["flash"] = str(folder / "spill")
    strategy = sections.get("strategy", {})
    memory = {**strategy.get("memory", {}), **memory}
    return {**sections, "strategy": {**strategy, "memory": memory}}


def _compared(
    rank: int, world: int, folder: Path, name: str, sections: dict[str, Any], tiers: str
) -> tuple[Ran, Ran, int]:
    """Under the smallest budget that there is and 1%; eagerly without; and that budget."""
    sections = few(sections)
    with pytest.raises(BudgetError) as refused:
        run_engine(rank, folder, f"{name}-refused", "graph", _with_budget(folder, sections, 1, tiers))
    found = re.search(r"at least ([\d,]+) bytes", str(refused.value))
    assert found is not None, str(refused.value)
    floor = int(found[1].replace(",", ""))
    within = _with_budget(folder, sections, int(1.01 * floor), tiers)
    moved = run_engine(rank, folder, f"{name}-{tiers}", "graph", within)
    return moved, run_engine(rank, folder, name, "eager", sections), floor


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES]
)
def test_steps_within_the_smallest_budget_are_equal_to_the_bit(name: str, folder: Path) -> None:
    tiers = list(TIERS)[list(FAMILIES).index(name) % len(TIERS)]
    moved, eager, _ = _compared(0, 1, folder, name, {"model": {"config": FAMILIES[name]}}, tiers)
    assert of_graph(moved)
    assert any(note.startswith("memory: ") and "go and come back" in note for note in moved.notes)
    assert differences(moved, eager) == {}
    assert not list((folder / "spill").glob("*")) if (folder / "spill").exists() else True


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit", pytest.param("lion", marks=pytest.mark.matrix)])
def test_state_of_other_optimizers_goes_and_comes_back(name: str, folder: Path) -> None:
    sections = {"train": {"steps": 4, "optimizer": {"name": name}}}
    moved, eager, _ = _compared(0, 1, folder, name, sections, "host")
    assert of_graph(moved)
    assert differences(moved, eager) == {}


WORKERS: dict[str, dict[str, Any]] = {
    "shard": {"strategy": {"axes": {"shard": 2}}},
    "replicate-shard": {"strategy": {"axes": {"replicate": 2, "shard": 2}}},
}


@pytest.mark.parametrize("name", ["shard", pytest.param("replicate-shard", marks=pytest.mark.matrix)])
def test_workers_are_equal_to_the_bit(name: str, folder: Path) -> None:
    sections = {**WORKERS[name], "train": {"micro_batch": 1, "optimizer": {"name": "adamw", "lr": 1e-3}}}
    tiers, world = ("pool", 2) if name == "shard" else ("both", 4)
    for moved, eager, _ in run_ranks(_compared, world, folder, f"workers-{name}", sections, tiers):
        assert of_graph(moved)
        assert differences(moved, eager) == {}


def test_a_resumed_run_may_have_another_budget_or_none(folder: Path) -> None:
    whole = run_config(folder, "whole")
    run(whole)
    memory = _with_budget(folder, {}, 10**6, "host")["strategy"]
    again = {"name": "resumed", "train": {**whole.train.model_dump(mode="json"), "steps": 6}}
    first = run_config(folder, **{**again, "train": {**again["train"], "steps": 3}}, strategy=memory)
    first = first.model_copy(
        update={"train": first.train.model_copy(update={"schedule": whole.train.schedule})}
    )
    run(first)
    run(run_config(folder, **again))
    assert metrics(run_config(folder, "resumed"), "tokens")[6] == metrics(whole, "tokens")[6]


def test_each_shape_of_batch_has_a_plan_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedText, "several", None)  # each batch is looked at
    monkeypatch.setattr(graph_cache, "MANY", 2)
    sections = {"data": packed_text(folder)}
    moved = run_engine(0, folder, "shapes-budget", "graph", _with_budget(folder, sections, 600_000, "host"))
    eager = run_engine(0, folder, "shapes", "eager", sections)
    assert len({note for note in moved.notes if "the step as a graph" in note}) > 1
    assert sum(note.startswith("memory: ") for note in moved.notes) > 1
    said = [note for note in moved.notes if note.startswith("a batch of a new shape (rows × positions: ")]
    assert said and all(" captured and planned in " in note and "; memory: " in note for note in said)
    assert sum(note.startswith("2 shapes of batches so far") for note in moved.notes) == 1
    assert differences(moved, eager) == {}


def test_what_cannot_be_captured_is_refused_and_not_run_over_the_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise CaptureError("line 7 asks for a value")

    monkeypatch.setattr("hyper_parallel.step.graph_cache.capture_one", refuses)
    with pytest.raises(BudgetError, match="line 7 asks for a value"):
        run_engine(0, folder, "refuses", "graph", _with_budget(folder, {}, "1GiB", "host"))


def test_a_later_batch_without_a_graph_ends_the_run_and_not_the_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedText, "several", None)  # each batch is looked at
    captured = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if captured:
            raise CaptureError("line 9 asks for a value")
        captured.append(True)
        return capture_one(*args, **kwargs)

    monkeypatch.setattr("hyper_parallel.step.graph_cache.capture_one", once)
    given = {"data": packed_text(folder), "train": {"graph_cache": False}}
    sections = _with_budget(folder, given, 600_000, "host")
    with pytest.raises(BudgetError, match="line 9 asks for a value"):
        run_engine(0, folder, "later", "graph", sections)


def test_a_model_of_ones_own_has_its_values_after_the_run(folder: Path) -> None:
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    trained = []
    for name, sections in (("own", few({})), ("own-budget", few(_with_budget(folder, {}, 400_000, "host")))):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **settings))
        run_engine(0, folder, name, "graph", sections, model=lambda model=model: model)
        trained.append(dict(model.named_parameters()))
    free, within = trained
    assert all(torch.equal(free[name], within[name]) for name in free)
    assert not paged_out_parameters._keepers


def test_a_loss_that_is_not_finite_names_the_worst_gradient_as_without_a_budget(folder: Path) -> None:
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    said = []
    for name, sections in (("nan", {}), ("nan-budget", _with_budget(folder, {}, 700_000, "host"))):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **settings))
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        with pytest.raises(NonFiniteError) as caught:
            run_engine(0, folder, name, "graph", sections, model=lambda model=model: model)
        said.append(str(caught.value))
    assert "the worst gradient is that of" in said[0]
    assert said[0] == said[1]
