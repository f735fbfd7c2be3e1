"""The graph that is assembled from a capture of few layers is the graph of a capture of all, node by node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.captured import inputs_of, micro_batches, recipe_of, shape_of
from harness.equivalence import build_model, draw_batch, family_config
from harness.families import FAMILIES
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.graph import StepGraph, executable
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.graph.likeness import difference
from hyper_parallel.shard import parallelize
from hyper_parallel.step import capture_micro_batch as capture_periods
from hyper_parallel.step import capture_train_step
from hyper_parallel.step.capture_micro_batch import capture_micro_batch
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one, state
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe

LENGTH = 32
Settings = dict[str, Any]


def _family(name: str, layers: int, more: Settings | None = None) -> Settings:
    family = {**FAMILIES[name], **(more or {})}
    count = "n_layer" if "n_layer" in family else "num_hidden_layers"
    kinds = family.get("layer_types")
    if kinds:
        family["layer_types"] = list(kinds) * (layers // len(kinds))
    return {**family, count: layers}


class _Assembled:
    """Counts what is assembled, and refuses to where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self.graphs = monkeypatch, 0
        whole = capture_periods._Plan.captured

        def counted(*given: Any) -> StepGraph:
            found = whole(*given)
            self.graphs += 1
            return found

        monkeypatch.setattr(capture_periods._Plan, "captured", counted)

    def compare(self, capture: Callable[[], StepGraph]) -> tuple[StepGraph, StepGraph]:
        """The assembled graph and that of a capture of all layers, which are the same."""
        before = self.graphs
        found = capture()
        assert self.graphs == before + 1, "all layers were captured"
        with self._patch.context() as patch:
            patch.setattr(capture_periods, "GAIN", 0.0)
            whole = capture()
        assert self.graphs == before + 1
        assert difference(found, whole) is None
        assert difference(whole, found) is None
        return found, whole


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> _Assembled:
    return _Assembled(monkeypatch)


SEVERAL = {"micro_batch": 2}
CELLS: dict[str, tuple[str, int, Settings, int]] = {
    "shard": ("llama", 12, {"axes": {"shard": 2}}, 1),
    "several micro-batches": ("llama-tied", 12, {"axes": {"shard": 2}, "memory": {"shard": "gradients"}}, 4),
    "shard optimizer": ("qwen2", 12, {"axes": {"shard": 2}, "memory": {"shard": "optimizer"}}, 4),
    "tensor, sequence": ("qwen3", 16, {"axes": {"tensor": 2}, "sequence": True}, 1),
    "2D": ("llama", 16, {"axes": {"tensor_x": 2, "tensor_y": 2}}, 1),
    "context": ("llama", 12, {"axes": {"context": 2}, "context": {"method": "ring"}}, 1),
    "recompute": ("llama", 12, {"axes": {"shard": 2}, "memory": {"recompute": "layer"}}, 1),
    "recompute some": (
        "llama",
        32,
        {"axes": {"shard": 2}, "memory": {"recompute": "layer", "recompute_layers": 24}},
        1,
    ),
    "layers in turn": ("gemma3", 24, {"axes": {"replicate": 2, "shard": 2}}, 2),
    "dropout": ("gpt2", 12, {"axes": {"shard": 2}}, 1),
    "fused dropout": ("phi3", 12, {"axes": {"tensor": 2}}, 1),
    "experts": ("mixtral", 16, {"axes": {"shard": 2, "expert": 2}}, 1),
    "experts, one device": ("qwen3-moe", 12, {"axes": {}}, 1),
    "dense first": ("deepseek-v3", 16, {"axes": {"shard": 2, "expert": 2}}, 4),
}
QUICK = ("shard", "several micro-batches", "tensor, sequence", "layers in turn", "dropout", "experts")


@pytest.mark.parametrize(
    "cell", [cell if cell in QUICK else pytest.param(cell, marks=pytest.mark.matrix) for cell in CELLS]
)
def test_the_assembled_step_is_that_of_a_capture_of_all_layers(cell: str, both: _Assembled) -> None:
    name, layers, strategy, count = CELLS[cell]
    family = _family(name, layers)
    config = family_config(family, strategy, {})
    with fake_ranks(config.strategy.axes.world, 0):
        recipe = recipe_of(family, config)
        both.compare(lambda: capture_one(recipe, MicroBatchShape(2, LENGTH, False), count))


@pytest.mark.parametrize("cell", ["shard optimizer", pytest.param("dense first", marks=pytest.mark.matrix)])
def test_so_is_the_assembled_micro_batch_of_packed_documents(cell: str, both: _Assembled) -> None:
    name, layers, strategy, count = CELLS[cell]
    family = _family(name, layers)
    config = family_config(family, strategy, {})
    with fake_ranks(config.strategy.axes.world, 0):
        recipe = recipe_of(family, config)
        found, _ = both.compare(lambda: capture_micro_batch(recipe, 2, LENGTH, count, documents=True))
    numbers = [name for name in found.outputs if name.startswith("gradient.unreduced:")]
    assert numbers == [f"gradient.unreduced:{at}" for at in range(len(numbers))]
    assert len(numbers) > layers


def _host(point: HostPoint, values: Any) -> Tensor | None:
    return torch.zeros(CONTROL_VECTOR) if point is HostPoint.LOAD else None


@pytest.mark.parametrize("name", ["gpt2", "qwen3-moe"])
def test_the_assembled_step_runs_to_the_same_bits(name: str, both: _Assembled) -> None:
    family = _family(name, 12)
    config = family_config(family, {"axes": {}}, {})
    recipe = recipe_of(family, config)
    micro = micro_batches(recipe.handle, config, draw_batch(family))
    (kind,) = shape_of(micro, True).each
    seen = []
    for graph in both.compare(lambda: capture_one(recipe, kind, 1)):
        inputs = {key: tensor.clone() for key, tensor in inputs_of(recipe, micro, 100.0).items()}
        run = executable(graph)
        for _ in range(2):
            run.run(inputs, _host)
        seen.append(inputs)
    before = state(recipe.handle, recipe.optimizer)
    assert not all(torch.equal(before[key].tensor, seen[0][key]) for key in before)
    assert {key for key in seen[0] if not torch.equal(seen[0][key], seen[1][key])} == set()


def _captured_operators(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Operators that are dispatched in a capture, in all."""
    count = 0
    own = capture_train_step.capture

    def counting(*given: Any) -> StepGraph:
        nonlocal count
        found = own(*given)
        count += sum(1 for _ in found.nodes)
        return found

    family = _family("llama", layers)
    recipe = recipe_of(family, family_config(family, {"axes": {}}, {}))
    with monkeypatch.context() as patch:
        patch.setattr(capture_train_step, "capture", counting)
        found = capture_one(recipe, MicroBatchShape(2, LENGTH, False), 1)
    assert sum(1 for _ in found.nodes) > 50 * layers
    return count


def test_what_is_captured_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _captured_operators(12, monkeypatch) == _captured_operators(36, monkeypatch)


def test_adapters_before_a_frozen_embedding(both: _Assembled) -> None:
    """The first layer has no gradient to hand on, and is captured beside those that stand for others."""
    peft = pytest.importorskip("peft")
    family = _family("llama", 16)
    config = family_config(family, {"axes": {"shard": 2}}, {})
    with fake_ranks(2, 0):
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        with torch.device("meta"):
            model = peft.get_peft_model(build_model(family), settings)
        parallelize(model, config.strategy, lowering="traceable")
        recipe = Recipe.of(config, model)
        both.compare(lambda: capture_one(recipe, MicroBatchShape(2, LENGTH, False), 1))


# What is refused.


def _whole(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a step was captured with all layers, as it must be."""
    reasons: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(capture_periods.log, "debug", lambda text, *of, **_: reasons.append(text % of))
        shape = MicroBatchShape(2, LENGTH, False)
        found = capture_one(recipe, shape, 1)
        patch.setattr(capture_periods, "GAIN", 0.0)
        assert difference(found, capture_one(recipe, shape, 1)) is None
    return "; ".join(reasons)


def _changed(change: Any, name: str = "llama", layers: int = 12, more: Settings | None = None) -> Recipe:
    """A recipe of a model that `change` has changed before it is parallelized."""
    family = _family(name, layers, more)
    config = family_config(family, {"axes": {}, "check": False}, {})
    model = build_model(family)
    change(model)
    parallelize(model, config.strategy, lowering="traceable", alone=True)
    return Recipe.of(config, model)


def test_layers_that_scale_by_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"scale_attn_by_inverse_layer_idx": True, "attn_implementation": "eager"}
    recipe = _changed(lambda model: None, "gpt2", more=more)
    # A setting of each layer says so: layers of different settings are not looked at as nodes.
    assert _whole(recipe, monkeypatch) == ""


def _each_layer(change: Any) -> Any:
    def apply(model: Any) -> None:
        for index, layer in enumerate(model.model.layers):
            change(index, layer)

    return apply


class _SevenIsOther(nn.Module):
    """In place of a layer's norm: its code, and no setting, makes one layer in the middle another one."""

    def __init__(self, norm: nn.Module, index: int) -> None:
        super().__init__()
        self.norm, self.index = norm, index

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x)
        return found * 2 if self.index == 7 else found


class _Listed(nn.Module):
    def __init__(self, norm: nn.Module, factors: list[float]) -> None:
        super().__init__()
        self.norm, self.factors = norm, factors

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x)
        return found * self.factors[0]


def test_a_layer_in_the_middle_that_asks_for_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(index: int, layer: Any) -> None:
        layer.input_layernorm = _SevenIsOther(layer.input_layernorm, index)

    assert "its own index" in _whole(_changed(_each_layer(change)), monkeypatch)


def test_a_layer_in_the_middle_with_another_number_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(index: int, layer: Any) -> None:
        layer.input_layernorm = _Listed(layer.input_layernorm, [3.0 if index == 7 else 2.0])

    # The layers on either side of it are too few to be worth while.
    assert _whole(_changed(_each_layer(change)), monkeypatch) == ""


def test_a_loss_of_each_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loss computes of each layer stands outside of all, and there is more of it with more layers."""

    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "grouped_mm"

    recipe = _changed(change, "mixtral", 12, {"output_router_logits": True})
    assert "periods of layers" in _whole(recipe, monkeypatch)


def test_layers_that_share_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        model.model.layers[7].mlp = model.model.layers[6].mlp

    assert _whole(_changed(change), monkeypatch) == ""


def _looped(model: Any, call: Any) -> None:
    """Have the model's own loop over its layers call each by `call(layer, index, x, **more)`."""

    class Loop(nn.ModuleList):
        def __getitem__(self, at: Any) -> Any:
            if not isinstance(at, slice):
                return super().__getitem__(at)
            return [partial(call, layer, index) for index, layer in enumerate(self._modules.values())]

    model.model.layers.__class__ = Loop


def test_a_model_that_computes_between_two_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(layer: Any, index: int, x: Tensor, **more: Any) -> Any:
        return layer(x * 2 if index == 7 else x, **more)

    found = _whole(_changed(lambda model: _looped(model, call)), monkeypatch)
    assert "layer 7 is not given what the layer in front of it returned" in found


def test_a_model_that_calls_one_of_its_layers_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(layer: Any, index: int, x: Tensor, **more: Any) -> Any:
        return layer(x, scaled=index == 7, **more)

    found = _whole(_changed(lambda model: _looped(model, call)), monkeypatch)
    assert "layer 7 is called otherwise than layer 0" in found


def test_a_model_that_leaves_one_of_its_layers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(layer: Any, index: int, x: Tensor, **more: Any) -> Any:
        return x if index == 7 else layer(x, **more)

    found = _whole(_changed(lambda model: _looped(model, call)), monkeypatch)
    assert "layer 7 runs 0 times" in found
