"""Experts under a budget: rows that the data decide fit into what was planned, or are planned anew, or refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import differences, of_graph, run_engine
from tiny_run import LLAMA
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from watched import watched

from harness import run_ranks
from harness.families import FAMILIES
from hyper_parallel.errors import BudgetError

MOE = {
    **LLAMA,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
}
STEPS = 3
PROBES = 1
"""Runs of the graph that update nothing: the weights of the last checkpoint are tried on a batch."""
SECTIONS: dict[str, Any] = {
    "strategy": {"axes": {"shard": 2, "expert": 2}},
    "train": {"steps": STEPS, "micro_batch": 4},
}


def _model(router: float) -> nn.Module:
    """The same values on every rank. `router`: how large the routers' weights are. Where they are 0 all experts have
    the same scores, so that every row goes to the first two, which one rank has; large ones take sides as well."""
    torch.manual_seed(0)
    settings = {key: value for key, value in MOE.items() if key != "model_type"}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=300, **settings))
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(router / 0.02)
    return model


def _within(
    budget: int, load: float | None, tiers: dict[str, Any], sections: dict[str, Any] = SECTIONS
) -> dict[str, Any]:
    memory = {"device": budget, **tiers, **({} if load is None else {"expert_load": load})}
    return {**sections, "strategy": {**sections["strategy"], "memory": memory}}


def _floor(
    rank: int,
    folder: Path,
    load: float,
    tiers: dict[str, Any],
    sections: dict[str, Any] = SECTIONS,
    model: Callable[[], nn.Module] | None = None,
) -> int:
    with pytest.raises(BudgetError) as refused:
        run_engine(rank, folder, f"floor-{load}", "graph", _within(1, load, tiers, sections), model)
    found = re.search(r"at least ([\d,]+) bytes", str(refused.value))
    assert found is not None, str(refused.value)
    return int(found[1].replace(",", ""))


@dataclass
class _Case:
    """What came of a run under a budget."""

    budget: int
    peaks: list[int] = field(default_factory=list)
    """Of each time that a step was run, or begun."""
    refused: str = ""
    notes: list[str] = field(default_factory=list)
    apart: dict[str, float] = field(default_factory=dict)
    """What differs from the same run without a budget, and by how much."""


def _case(
    rank: int, folder: Path, name: str, router: float, budget: int, load: float | None, tiers: dict[str, Any]
) -> _Case:
    found = _Case(budget)
    with watched(found.peaks, found.budget):
        try:
            moved = run_engine(
                rank, folder, name, "graph", _within(budget, load, tiers), lambda: _model(router)
            )
        except BudgetError as error:
            found.refused = str(error)
            return found
    assert of_graph(moved)
    found.notes = moved.notes
    eager = run_engine(rank, folder, name, "eager", SECTIONS, lambda: _model(router))
    found.apart = differences(moved, eager)
    return found


def _cases(rank: int, world: int, folder: Path, tiers: dict[str, Any]) -> tuple[list[int], dict[str, _Case]]:
    """The floors for some loads, and each case."""
    floors = [_floor(rank, folder, load, tiers, model=lambda: _model(0.0)) for load in (1.0, 1.5, 2.0)]
    least, usual, most = (int(1.01 * floor) for floor in floors)
    cases = {
        "even": _case(rank, folder, "even", 0.02, usual, None, tiers),
        "hot": _case(rank, folder, "hot", 0.0, most, 1.1, tiers),
        "refused": _case(rank, folder, "refused", 0.0, usual, None, tiers),
    }
    draw = random.Random(0)
    for number in range(2):
        budget = draw.randint(least, most)
        name = f"random-{number}"
        cases[name] = _case(rank, folder, name, draw.choice((0.5, 2.0, 8.0)), budget, 1.0, tiers)
    return floors, cases


@pytest.mark.matrix
def test_two_workers_are_never_over_the_budget_whatever_the_routing(tmp_path: Path) -> None:
    ranks = run_ranks(_cases, 2, tmp_path, {"host": "64MiB"}, timeout=600)
    for floors, cases in ranks:
        assert floors[0] < floors[1] < floors[2]  # what is planned for is what it takes
        for name, case in cases.items():
            assert case.apart == {}, name
            assert case.peaks
            assert max(case.peaks) <= case.budget, name
        even, hot, refused = (cases[name] for name in ("even", "hot", "refused"))
        assert len(even.peaks) == STEPS + PROBES
        assert not even.refused
        # Planned for 1.1, stopped at 2, planned anew, begun again.
        assert len(hot.peaks) == STEPS + 1 + PROBES
        assert any(
            "get 2 times their even share" in note and "planned anew for 2.2" in note for note in hot.notes
        )
        assert len(refused.peaks) == 1
        assert "get 2 times their even share" in refused.refused
        assert "strategy.memory.expert_load=2 " in refused.refused
    # One that stops, all stop.
    for name in ranks[0][1]:
        assert len({(len(cases[name].peaks), bool(cases[name].refused)) for _, cases in ranks}) == 1


FOUR: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model": {"config": {**MOE, "model_type": "mixtral"}},
        "strategy": {"axes": {"shard": 4, "expert": 4}},
    },
    "deepseek-v3": {
        "model": {
            "config": {key: value for key, value in FAMILIES["deepseek-v3"].items() if key != "vocab_size"}
        },
        "strategy": {"axes": {"shard": 2, "tensor": 2, "expert": 2}},
    },
}


def _four(rank: int, world: int, folder: Path, name: str) -> _Case:
    """Under the smallest budget for any routing and 1%."""
    sections = {**FOUR[name], "train": {"micro_batch": 1}}
    tiers = {"host": "100KiB", "flash": str(folder / "spill")}
    found = _Case(int(1.01 * _floor(rank, folder, 4.0, tiers, sections)))
    with watched(found.peaks, found.budget):
        within = _within(found.budget, 4.0, tiers, sections)
        moved = run_engine(rank, folder, "within", "graph", within)
    eager = run_engine(rank, folder, "free", "eager", sections)
    found.notes, found.apart = moved.notes, differences(moved, eager)
    assert of_graph(moved)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", FOUR)
def test_twenty_steps_of_four_workers_within_the_smallest_budget_are_equal_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    for case in run_ranks(_four, 4, tmp_path, name, timeout=600):
        assert case.apart == {}
        assert len(case.peaks) == 20 + PROBES
        assert max(case.peaks) <= case.budget
        assert any("experts' rows at most 4 times" in note for note in case.notes)
