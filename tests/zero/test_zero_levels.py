"""The ZeRO levels: one device's gradients at each, and the collectives that each makes in a step."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "shard"))
from families import Step, build, one_device_step, simulated_step, step

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.compat.collectives import counting
from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy import Memory, Strategy

LEVELS = ["optimizer", "gradients", "parameters"]
expected_step = functools.cache(one_device_step)


def _rank(
    rank: int, world: int, family: str, fields: dict[str, Any], steps: int
) -> tuple[Step, Counter[str]]:
    """The last step's values, and FSDP2's collectives in its two micro-batches; sums over all ranks are metrics."""
    strategy = Strategy(**fields, check=False)
    model = build(family)
    shard.parallelize(model, strategy)
    shard.init_weights(model, seed=1)
    copies = tuple(shard.sharded(model).mesh.peers(rank, ("replicate",)))
    for _ in range(steps):
        model.zero_grad()
        with counting() as counted:
            outcome = step(model, strategy, micro_batches=2)
    kinds = Counter(c.kind for c in counted if c.kind in ("all_gather", "reduce_scatter"))
    if 1 < len(copies) < world:
        kinds["all_reduce"] = sum(c.kind == "all_reduce" and c.ranks == copies for c in counted)
    return outcome, kinds


def _close(got: Step, expected: Step) -> None:
    assert got.loss == pytest.approx(expected.loss, abs=2e-6)
    assert got.norm == pytest.approx(expected.norm, rel=1e-5)
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(got.gradients[name], gradient, rtol=0, atol=5e-7, msg=name)


# Three groups of parameters: two layers, and the rest in the root, which is never freed within a step. Two
# micro-batches. Freed ones are gathered for the forward and again for the backward pass of each.
COLLECTIVES = {
    "optimizer": {"all_gather": 3, "reduce_scatter": 3},
    "gradients": {"all_gather": 3, "reduce_scatter": 6},
    "parameters": {"all_gather": 2 * (2 * 2 + 1), "reduce_scatter": 6},
}
KEPT = {"reshard_after_forward": {"*": False, "model.layers.1": True}}
AXES = {
    "replicate 2": {"replicate": 2},
    "replicate 2 shard 2": {"replicate": 2, "shard": 2},
    "shard 2 tensor 2": {"shard": 2, "tensor": 2},
}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    **{level: ("llama", {"axes": {"shard": 2}, "memory": {"shard": level}}, 2) for level in LEVELS},
    "kept": ("llama", {"axes": {"shard": 2}, "memory": KEPT}, 1),
    **{
        f"{name}, {level}": (
            "llama-tied",
            {"axes": axes, "memory": {"shard": level, "recompute": "layer"}},
            1,
        )
        for name, axes in AXES.items()
        for level in LEVELS
    },
}


def _ranks(rank: int, world: int, cases: list[tuple[str, dict[str, Any], int]]) -> list[Any]:
    return [_rank(rank, world, *case) for case in cases]


@pytest.fixture(scope="module")
def ran() -> dict[str, list[tuple[Step, Counter[str]]]]:
    """What each rank of each case computed. The same workers run all cases of as many ranks."""
    found = {}
    for world in (2, 4):
        names = [name for name, (_, fields, _) in CASES.items() if Strategy(**fields).axes.world == world]
        by_rank = run_ranks(_ranks, world, [CASES[name] for name in names])
        found.update(zip(names, zip(*by_rank, strict=True), strict=True))
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_makes_its_collectives_and_the_same_gradients(ran: Any, level: str) -> None:
    for got, kinds in ran[level]:
        _close(got, expected_step("llama"))
        assert kinds == COLLECTIVES[level]


def test_layers_that_keep_their_parameters_are_not_gathered_again(ran: Any) -> None:
    for got, kinds in ran["kept"]:
        _close(got, expected_step("llama"))
        assert kinds == {"all_gather": 2 * (2 + 1 + 1), "reduce_scatter": 6}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", AXES)
def test_each_level_composes(ran: Any, name: str, level: str) -> None:
    for got, kinds in ran[f"{name}, {level}"]:
        _close(got, expected_step("llama-tied"))
        # Gradients are summed over the copies of a shard in the last micro-batch only.
        assert kinds.get("all_reduce", 3) == 3


@pytest.mark.parametrize("level", LEVELS)
def test_the_traceable_lowering_gives_the_same_gradients(level: str) -> None:
    strategy = Strategy(axes={"shard": 2}, memory={"shard": level})
    _close(simulated_step("llama", strategy), expected_step("llama"))


def test_a_pattern_that_no_layer_has_is_refused() -> None:
    model = build("llama")
    memory = {"reshard_after_forward": {"*.mlp": False}}
    said = (
        r"pattern '\*\.mlp' matches no module that is gathered by itself; these are model\.layers\.0, model"
    )
    with pytest.raises(StrategyError, match=said):
        shard.parallelize(model, Strategy(memory=memory))
    assert not hasattr(model, "_hyper_parallel")


@pytest.mark.parametrize("level", ["optimizer", "gradients"])
@pytest.mark.parametrize("asked", [True, {"*": True}])
def test_freeing_what_the_level_keeps_is_refused(level: str, asked: Any) -> None:
    with pytest.raises(ValueError, match=f"frees parameters that 'shard: {level}' keeps"):
        Memory(shard=level, reshard_after_forward=asked)
    assert Memory(shard=level, reshard_after_forward=False).shard == level
