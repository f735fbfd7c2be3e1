"""Pipelines under a memory budget: every loss, norm, parameter and moment has the bits of the run without, and whoever
looks at each operator's tensors never sees more than the budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import differences, run_engine
from tiny_run import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM
from watched import watched

from harness import run_ranks
from harness.families import FAMILIES
from hyper_parallel.errors import BudgetError, NonFiniteError

STEPS = 3
SHARE = 0.6
"""The budget, as a share of what a step takes without one."""
SMALL = {**LLAMA, "tie_word_embeddings": True}
TIED = {**SMALL, "num_hidden_layers": 4}
EXPERTS = {key: value for key, value in FAMILIES["mixtral"].items() if key != "vocab_size"}


def _sections(model: dict[str, Any], axes: dict[str, int], **strategy: Any) -> dict[str, Any]:
    return {
        "model": {"config": model},
        "strategy": {"axes": axes, **strategy},
        "train": {"micro_batch": 1, "steps": STEPS},
    }


CASES: dict[str, dict[str, Any]] = {
    "1f1b-tied": _sections(SMALL, {"pipeline": 2}, pipeline={"schedule": "1f1b"}),
    "auto-uneven": _sections(TIED, {"pipeline": 2}, pipeline={"layers": [3, 1]}),
    "zb-v": _sections(TIED, {"pipeline": 2}, pipeline={"schedule": "zb-v"}),
    "recompute": _sections(TIED, {"pipeline": 2}, memory={"recompute": "layer"}),
    "experts": _sections({**EXPERTS, "output_router_logits": True}, {"pipeline": 2}),
    "gpt2": _sections(
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}, {"pipeline": 2}
    ),
}
FOUR: dict[str, dict[str, Any]] = {
    "tensor": _sections(
        SMALL,
        {"pipeline": 2, "tensor": 2},
        sequence=True,
        pipeline={"schedule": "1f1b", "overlap_forward_backward": True},
    ),
    "interleaved": _sections(
        {**TIED, "num_hidden_layers": 8}, {"pipeline": 4}, pipeline={"schedule": "interleaved", "virtual": 2}
    ),
    "shard": _sections(TIED, {"pipeline": 2, "shard": 2}, memory={"shard": "optimizer"}),
}
QUICK = ("1f1b-tied", "tensor")


@dataclass
class _Case:
    """What came of one run under a budget."""

    floor: int
    budget: int
    peaks: list[int]
    """Of each step under the budget, and of the probe of the last weights."""
    apart: dict[str, float]


def _within(sections: dict[str, Any], budget: int) -> dict[str, Any]:
    strategy = sections["strategy"]
    memory = {**strategy.get("memory", {}), "device": budget, "host": "64MiB"}
    return {**sections, "strategy": {**strategy, "memory": memory}}


def _run(rank: int, world: int, folder: Path, sections: dict[str, Any]) -> _Case:
    with pytest.raises(BudgetError) as refused:
        run_engine(rank, folder, "floor", "graph", _within(sections, 1))
    assert refused.value.floor is not None
    assert "\n" not in str(refused.value)
    assert f"at least {refused.value.floor:,} bytes" in str(refused.value)
    plain = run_engine(rank, folder, "plain", "graph", sections)
    free: list[int] = []
    with watched(free):
        run_engine(rank, folder, "free", "graph", _within(sections, 2**30))
    # Each rank has stages of its own, and all have one budget.
    everyone = torch.tensor(max(free))
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    budget = max(int(SHARE * everyone.item()), refused.value.floor)
    peaks: list[int] = []
    with watched(peaks, budget):
        moved = run_engine(rank, folder, "within", "graph", _within(sections, budget))
    assert any(note.startswith("memory: ") and "without a budget" in note for note in moved.notes)
    return _Case(refused.value.floor, budget, peaks, differences(moved, plain))


def _check(found: list[_Case]) -> None:
    assert len({case.floor for case in found}) == 1  # one rank's is told to all
    for case in found:
        assert case.apart == {}
        assert len(case.peaks) >= STEPS
        assert max(case.peaks) <= case.budget


def _some(cases: dict[str, Any]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in cases]


@pytest.mark.parametrize("name", _some(CASES))
def test_two_workers_within_a_budget_have_the_bits_of_those_without(name: str, tmp_path: Path) -> None:
    _check(run_ranks(_run, 2, tmp_path, CASES[name], timeout=280))


@pytest.mark.parametrize("name", _some(FOUR))
def test_four_workers_within_a_budget_have_the_bits_of_those_without(name: str, tmp_path: Path) -> None:
    _check(run_ranks(_run, 4, tmp_path, FOUR[name], timeout=280))


def _broken(rank: int, world: int, folder: Path) -> list[str]:
    """What a run says whose loss is not finite, without a budget and within one."""
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    said = []
    plain = CASES["1f1b-tied"]
    for name, sections in (("nan", plain), ("nan-budget", _within(plain, 500_000))):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **settings))
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        with pytest.raises(NonFiniteError) as caught:
            run_engine(rank, folder, name, "graph", sections, model=lambda model=model: model)
        said.append(str(caught.value))
    return said


def test_a_loss_that_is_not_finite_names_the_worst_gradient_as_without_a_budget(tmp_path: Path) -> None:
    for free, within in run_ranks(_broken, 2, tmp_path, timeout=240):
        assert "the worst gradient is that of" in free
        assert free == within


def _spread_experts(rank: int, world: int, folder: Path) -> str:
    sections = _sections(EXPERTS, {"pipeline": 2, "shard": 2, "expert": 2})
    with pytest.raises(BudgetError) as refused:
        run_engine(rank, folder, "experts", "graph", _within(sections, 2**30))
    return str(refused.value)


def test_experts_whose_rows_the_data_decide_are_refused_with_the_mend(tmp_path: Path) -> None:
    for said in run_ranks(_spread_experts, 4, tmp_path, timeout=240):
        assert "the rows of each expert depend on the data" in said
        assert said.endswith("leave axes.expert, the pipeline or the budget out")
        assert "\n" not in said
