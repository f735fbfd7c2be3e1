"""Layer lists are cut into stages by counts, and balanced cuts are the best there are."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from torch import fx

from harness.families import FAMILIES
from harness.pipelines import Captured, in_stages
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.stage_cut import (
    balanced_counts,
    balanced_cut,
    count_layers,
    flops_cost,
    layer_stages,
)
from hyper_parallel.graph.stage_graph import Stage, partition

LAYERS = {"gpt2": "transformer.h"}


@functools.cache
def _captured(family: str) -> Captured:
    size = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    return Captured({**FAMILIES[family], **size})


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_stages_of_a_balanced_cut_have_the_bits_of_the_whole(family: str, stages: int) -> None:
    found, layers = _captured(family), LAYERS.get(family, "model.layers")
    counts = balanced_counts(found.step, layers, stages, flops_cost(found.step))
    assert sum(counts) == 4
    cut = partition(found.step, layer_stages(layers, counts, found.step), stages)
    whole, staged = found.whole(), in_stages(cut, found.state, found.batches, together=True)
    assert whole.keys() == staged.keys()
    assert all(torch.equal(whole[name], staged[name]) for name in whole if name not in cut.shared)
    for name in cut.shared:
        torch.testing.assert_close(staged[name], whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("counts", [(0, 2, 2, 0), (0, 4), (4, 0)])
def test_an_end_stage_may_have_no_layers(family: str, counts: tuple[int, ...]) -> None:
    found, layers = _captured(family), LAYERS.get(family, "model.layers")
    cut = partition(found.step, layer_stages(layers, counts, found.step), len(counts))
    assert tuple(len(_layers_of(stage, layers)) for stage in cut.stages) == counts
    if not counts[-1]:
        last = {one.name for one in cut.stages[-1].step.inputs if one.kind == "parameter"}
        assert "parameter.model.norm.weight" in last or "parameter.transformer.ln_f.weight" in last
    whole, staged = found.whole(), in_stages(cut, found.state, found.batches, together=False)
    assert all(torch.equal(whole[name], staged[name]) for name in whole if name not in cut.shared)


def test_every_stage_has_the_layers_that_were_counted() -> None:
    found = _captured("llama")
    first, second = partition(found.step, layer_stages("model.layers", (3, 1)), 2).stages
    assert _layers_of(first) == {0, 1, 2}
    assert _layers_of(second) == {3}


def _layers_of(stage: Stage, layers: str = "model.layers") -> set[int]:
    """The layers whose parameters a stage needs."""
    start = f"parameter.{layers}."
    names = (one.name for one in stage.step.inputs)
    return {int(name.removeprefix(start).split(".")[0]) for name in names if name.startswith(start)}


def test_the_head_counts_in_the_last_stage_and_the_embedding_in_the_first() -> None:
    found = _captured("llama")

    def cost(node: fx.Node) -> float:
        module = node.meta["module"]
        return 100.0 if module == "lm_head" else 1.0 if module.startswith("model.layers.") else 0.0

    assert balanced_counts(found.step, "model.layers", 3, cost) == (2, 2, 0)

    def costly_embedding(node: fx.Node) -> float:
        module = node.meta["module"]
        return (
            1000.0 if module == "model.embed_tokens" else 1.0 if module.startswith("model.layers.") else 0.0
        )

    assert balanced_counts(found.step, "model.layers", 3, costly_embedding) == (0, 2, 2)


def _brute_force(
    layers: list[float], stages: int, before: float, after: float
) -> tuple[float, float, tuple[int, ...]]:
    best = None
    for bounds in itertools.combinations_with_replacement(range(len(layers) + 1), stages - 1):
        edges = (0, *bounds, len(layers))
        counts = tuple(b - a for a, b in itertools.pairwise(edges))
        if any(count == 0 for count in counts[1:-1]):
            continue
        costs = [sum(layers[a:b]) for a, b in itertools.pairwise(edges)]
        costs[0] += before
        costs[-1] += after
        found = (max(costs), sum(cost * cost for cost in costs), counts)
        best = found if best is None or found < best else best
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    count, stages = draw.randint(1, 9), draw.randint(1, 5)
    stages = min(stages, count + 2)
    # Eighths add up without rounding, so that ties are ties.
    drawn = [draw.randint(0, 24) / 8 for _ in range(count)] if seed % 2 else [1.0] * count
    before, after = draw.randint(0, 32) / 8, draw.randint(0, 32) / 8
    assert (
        balanced_cut(drawn, stages, before=before, after=after)
        == _brute_force(drawn, stages, before, after)[2]
    )


def test_of_cuts_that_are_as_good_the_earlier_stages_have_fewer_layers() -> None:
    assert balanced_cut([1.0] * 10, 4) == (2, 2, 3, 3)
    assert balanced_cut([1.0] * 12, 4, after=1.0) == (3, 3, 3, 3)
    # Sums of tenths differ in their last bits with the order in which they are added.
    assert balanced_cut([0.1] * 30, 3) == (10, 10, 10)


def test_more_stages_than_the_layers_allow_are_refused_with_a_mend() -> None:
    found = _captured("llama")
    cost = flops_cost(found.step)
    assert balanced_counts(found.step, "model.layers", 6, cost) == (0, 1, 1, 1, 1, 0)
    with pytest.raises(
        StrategyError,
        match=r"^axes.pipeline · pipeline.virtual = 7 stages, and the model has 4 layers \(model.layers\), which can "
        r"be cut into at most 6 stages; make axes.pipeline or pipeline.virtual smaller$",
    ):
        balanced_counts(found.step, "model.layers", 7, cost)


def test_counts_that_are_not_the_models_are_refused() -> None:
    step = _captured("llama").step
    with pytest.raises(
        StrategyError, match=r"places 5 layers, and the model has 4 .*change the counts to sum to 4"
    ):
        layer_stages("model.layers", (2, 3), step)
    with pytest.raises(StrategyError, match=r"places 3 layers, and the model has more: model.layers.3"):
        partition(step, layer_stages("model.layers", (2, 1)), 2)
    with pytest.raises(StrategyError, match=r"leaves stage 1 without layers; only the first and the last"):
        layer_stages("model.layers", (1, 0, 3))
    with pytest.raises(StrategyError, match=r"leaves an end stage without layers"):
        layer_stages("model.layers", (4, 0))
    with pytest.raises(StrategyError, match=r"no module of 'model.blocks' computes"):
        count_layers(step, "model.blocks")
