"""The step's graph against the eager step: every loss, norm, parameter and moment, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TRAIN, Ran, both, differences, few, of_graph, packed_text, run_engine
from peft import LoraConfig, get_peft_model
from tiny_run import LLAMA, Bigram
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from harness import run_ranks
from hyper_parallel.data import PackedText
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph
from hyper_parallel.step import graph_cache
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one
from hyper_parallel.step.optimizer import AdamW
from hyper_parallel.train import register_optimizer

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MUON = {"name": "muon", "lr": 0.01}

ALONE: dict[str, dict[str, Any]] = {
    "llama": {"train": {"steps": TRAIN["steps"]}},
    "gpt2-dropout": {"model": {"config": GPT2}},
    "tied": {"model": {"config": {**LLAMA, "tie_word_embeddings": True}}},
    "bf16": {"strategy": {"precision": {"compute": "bfloat16"}}},
    "recompute": {"strategy": {"memory": {"recompute": "layer"}}},
    "recompute-one": {"strategy": {"memory": {"recompute": "layer", "recompute_layers": 1}}},
    "selective": {"strategy": {"memory": {"recompute": "selective"}}},
    "selective-scores": {
        "strategy": {"memory": {"recompute": "selective"}},
        "model": {"attention": "eager"},
    },
    "not-clipped": {"train": {"clip": None}},
    "muon": {"train": {"optimizer": MUON}},
    "lion": {"train": {"optimizer": {"name": "lion"}}},
    "adafactor": {
        "train": {"optimizer": {"name": "adafactor", "scale_parameter": True, "weight_decay": 0.1}}
    },
    "adamw_8bit": {"train": {"optimizer": {"name": "adamw_8bit"}}},
    "mixtral": {"model": {"config": MIXTRAL}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.mark.parametrize("name", ALONE)
def test_all_steps_are_equal_to_the_bit(name: str, folder: Path) -> None:
    graph, eager = both(0, folder, name, ALONE[name])
    assert of_graph(graph) and not eager.notes
    assert differences(graph, eager) == {}
    norms = graph.metrics["grad_norm"].values()
    if name == "llama":
        assert min(norms) < TRAIN["clip"] < max(norms)


def test_each_shape_of_batch_has_a_graph_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedText, "several", None)  # each batch is looked at
    graph, eager = both(
        0, folder, "packed", {"data": packed_text(folder), "train": {"steps": TRAIN["steps"]}}
    )
    assert of_graph(graph)
    notes = [note for note in graph.notes if "the step as a graph" in note]
    captured = {note.partition("(")[2] for note in notes}
    assert len(captured) == len(notes) > 1
    assert any("packed" in note for note in captured)
    assert differences(graph, eager) == {}


def _adapted() -> nn.Module:
    torch.manual_seed(0)
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=300, **settings))
    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "up_proj"], lora_dropout=0.1))


def test_adapters(folder: Path) -> None:
    graph, eager = both(0, folder, "lora", {}, model=_adapted)
    assert of_graph(graph)
    assert differences(graph, eager) == {}


def _both(rank: int, world: int, folder: Path, name: str, sections: dict[str, Any]) -> tuple[Ran, Ran]:
    return both(rank, folder, name, sections)


TWO: dict[str, dict[str, Any]] = {
    "parameters": {"strategy": {"axes": {"shard": 2}}},
    "gradients": {"strategy": {"axes": {"shard": 2}, "memory": {"shard": "gradients"}}},
    "optimizer-bf16": {
        "strategy": {
            "axes": {"shard": 2},
            "memory": {"shard": "optimizer"},
            "precision": {"compute": "bfloat16"},
        }
    },
    "replicate": {"strategy": {"axes": {"replicate": 2}}, "train": {"optimizer": MUON}},
    "tensor": {
        "strategy": {"axes": {"tensor": 2}, "sequence": True},
        "train": {"optimizer": {"name": "adafactor", "lr": 3e-3}},
    },
    "selective": {
        "strategy": {
            "axes": {"tensor": 2},
            "sequence": True,
            "memory": {"recompute": "selective", "recompute_layers": 1},
        }
    },
    "selective-shard": {
        "strategy": {"axes": {"shard": 2}, "memory": {"recompute": "selective"}},
        "model": {"config": MIXTRAL},
    },
}


@pytest.mark.parametrize("name", TWO)
def test_two_workers_are_equal_to_the_bit(name: str, folder: Path) -> None:
    sections = {**TWO[name], "train": {"micro_batch": 2, **TWO[name].get("train", {})}}
    for graph, eager in run_ranks(_both, 2, folder, name, sections):
        assert of_graph(graph)
        assert differences(graph, eager) == {}


WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 704}
FOUR: dict[str, tuple[dict[str, Any], float]] = {
    "replicate-shard": ({"strategy": {"axes": {"replicate": 2, "shard": 2}}}, 0.0),
    # A ring adds up each segment of a buffer beginning with another rank, and FSDP2's buffers are those of layers.
    "replicate": ({"strategy": {"axes": {"replicate": 4}}, "model": {"config": WIDE}}, 5e-6),
}


@pytest.mark.parametrize("name", FOUR)
def test_four_workers_are_equal_up_to_the_order_of_sums(name: str, folder: Path) -> None:
    sections, tolerance = FOUR[name]
    train = {"micro_batch": 1 if tolerance == 0 else 2, "optimizer": {"name": "adamw", "lr": 1e-3}}
    for graph, eager in run_ranks(_both, 4, folder, f"four-{name}", {**sections, "train": train}):
        assert of_graph(graph)
        assert max(differences(graph, eager).values(), default=0.0) <= tolerance


class Asks(Bigram):
    """Wants to know a value while it computes."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids)
        if logits.sum() > 1e9:
            raise ArithmeticError
        return logits


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why(folder: Path) -> None:
    graph, eager = both(0, folder, "asks", {}, model=Asks)
    *_, said = graph.notes
    reason, lost = said.splitlines()
    assert f"{__file__}:" in reason and "if logits.sum() > 1e9" in reason
    assert "train.engine=eager" in lost
    assert not eager.notes
    assert differences(graph, eager) == {}


def test_an_optimizer_that_a_graph_cannot_hold_runs_eagerly(folder: Path) -> None:
    class Plain:
        """What the seam asked for before there were graphs."""

        def __init__(self, inner: AdamW) -> None:
            self.config, self.step, self.pieces = inner.config, inner.step, inner.pieces
            self.state, self.load_state = inner.state, inner.load_state

    register_optimizer("adamw", lambda model, parameters, config: Plain(AdamW(parameters, config)))
    try:
        graph, eager = both(0, folder, "plain", {"train": {"steps": 3}})
    finally:
        register_optimizer("adamw", lambda model, parameters, config: AdamW(parameters, config))
    *_, said = graph.notes
    assert "the optimizer Plain has no 'tensors'" in said and "train.engine=eager" in said
    assert differences(graph, eager) == {}


def _one_asks(rank: int, world: int, folder: Path) -> tuple[Ran, Ran]:
    sections = {"strategy": {"axes": {"shard": 2}}}
    return both(rank, folder, "one-asks", sections, model=Asks if rank == 1 else Bigram)


def test_ranks_agree_on_the_engine(folder: Path) -> None:
    (first, expected), (second, _) = run_ranks(_one_asks, 2, folder)
    assert first.notes[-1].startswith(graph_cache.ELSEWHERE) and "if logits.sum()" in second.notes[-1]
    assert differences(first, expected) == {}


def _later(rank: int, world: int, folder: Path) -> tuple[Ran, Ran]:
    """Rank 1 cannot capture steps with rows of several documents, and each batch is looked at for them."""

    def capture(recipe: Any, shape: MicroBatchShape, *more: Any, **how: Any) -> StepGraph:
        if rank == 1 and shape.documents:
            raise CaptureError("no packed rows here")
        return capture_one(recipe, shape, *more, **how)

    graph_cache.capture_one = capture
    PackedText.several = None
    sections = {
        "strategy": {"axes": {"shard": 2}},
        "data": packed_text(folder / str(rank)),
        "train": {"steps": TRAIN["steps"], "batch": 4, "micro_batch": 2},
    }
    return both(rank, folder, "later", sections)


def test_ranks_leave_the_graph_together_in_the_middle_of_a_run(folder: Path) -> None:
    for rank in range(2):
        (folder / str(rank)).mkdir()
    found = run_ranks(_later, 2, folder)
    for rank, (graph, eager) in enumerate(found):
        assert any("the step as a graph" in note for note in graph.notes)
        said = [note for note in graph.notes if "eagerly" in note]
        assert len(said) == 1 and said[0].startswith("no packed rows here" if rank else graph_cache.ELSEWHERE)
        assert differences(graph, eager) == {}


@pytest.mark.parametrize(("before", "after"), [("graph", "eager"), ("eager", "graph")])
def test_a_run_goes_on_with_the_other_engine(before: str, after: str, folder: Path) -> None:
    sections: dict[str, Any] = few({"train": {"schedule": {"name": "constant"}}})
    whole = run_engine(0, folder, "whole", after, sections)
    name = f"from-{before}"
    run_engine(0, folder, name, before, {"train": {**sections["train"], "steps": 3}})
    (folder / f"{name}-{before}").rename(folder / f"{name}-{after}")
    resumed = run_engine(0, folder, name, after, sections)
    del resumed.metrics["eval_loss"], whole.metrics["eval_loss"]  # one more evaluation, after step 3
    assert differences(resumed, whole) == {}
