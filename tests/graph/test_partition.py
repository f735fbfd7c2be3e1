"""Stages that a micro-batch was cut into compute what it computes whole, whatever the model looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.families import FAMILIES
from harness.pipelines import Captured, Tensors, captured_module, even_cut, in_stages, summed
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import executable
from hyper_parallel.graph.partition import by_modules, data_sources, label
from hyper_parallel.graph.stage_graph import partition

SAMPLE = ("llama-tied", "gemma3", "deepseek-v3", "gpt2")
LISTS = {"gpt2": ("transformer.h",)}


@pytest.mark.parametrize(
    "family",
    [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES],
)
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "all in flight"])
def test_stages_have_the_bits_of_the_whole(family: str, together: bool) -> None:
    found = Captured(FAMILIES[family])
    lists = LISTS.get(family, ("model.language_model.layers",) if "vl" in family else ("model.layers",))
    cut = partition(found.step, by_modules(even_cut(found.model, 2, *lists)), 2)
    whole, staged = found.whole(), in_stages(cut, found.state, found.batches, together=together)
    assert whole.keys() == staged.keys()
    alone = {name for name in whole if name not in cut.shared}
    assert all(torch.equal(whole[name], staged[name]) for name in alone)
    # Contributions of stages are summed last, not in each micro-batch.
    for name in cut.shared:
        torch.testing.assert_close(staged[name], whole[name], rtol=1e-5, atol=1e-6)
    assert all(one.step.inputs for one in cut.stages)


def test_each_stage_needs_its_own_parameters_and_the_hidden_states_alone() -> None:
    found = Captured(FAMILIES["llama"])
    first, last = partition(found.step, by_modules(even_cut(found.model, 2, "model.layers")), 2).stages
    names = [{one.name for one in stage.step.inputs if one.kind == "parameter"} for stage in (first, last)]
    assert not names[0] & names[1]
    assert {"parameter.model.embed_tokens.weight"} <= names[0]
    assert {"parameter.lm_head.weight", "parameter.model.norm.weight"} <= names[1]
    assert len(first.sends) == len(last.receives) == len(last.gradients_out) == len(first.gradients_in) == 1
    assert not {one.name for one in last.step.inputs} & {"micro.input_ids"}


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_a_tied_weight_that_is_cast_stays_where_it_is_used(family: str) -> None:
    found = Captured(FAMILIES[family], {"precision": {"compute": "bfloat16"}})
    (layers,) = LISTS.get(family, ("model.layers",))
    cut = partition(found.step, by_modules(even_cut(found.model, 2, layers)), 2)
    (name,) = cut.shared
    assert "embed" in name or "wte" in name
    # Hidden states and their gradient cross, and neither the weight nor its gradient.
    rows, length = found.batches[0]["micro.input_ids"].shape
    crossing = [one for stage in cut.stages for one in (*stage.sends, *stage.gradients_out)]
    large = [tuple(one.value.shape) for one in crossing if one.value.elements > 1]
    assert large == [(rows, length, 32)] * 2
    whole, staged = found.whole(), in_stages(cut, found.state, found.batches, together=True)
    assert all(torch.equal(whole[key], staged[key]) for key in whole if key != name)
    # Summed in float32, and in bfloat16 in one piece.
    torch.testing.assert_close(staged[name], whole[name], rtol=2**-6, atol=2**-12)


# Modules that no rule about layers would foresee.


class Skip(nn.Module):
    """The last block is given what the first one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x).relu()
        y = self.blocks[2](self.blocks[1](first).relu()).relu()
        out: Tensor = self.blocks[3](y + first)
        return out


class Shared(nn.Module):
    """One weight is used in two stages, and its gradient has a part in each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](self.blocks[0](x * self.scale).relu() * self.scale)
        return out


class SharedOften(nn.Module):
    """One weight is used three times in the first stage and twice in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x).tanh() * self.scale
        return x


class ChangedBefore(nn.Module):
    """What the second stage is given was changed before, in place and in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), Biased()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        y[:, 0] = 0.0
        y.mul_(2.0)
        out: Tensor = self.blocks[1](y)
        return out


class Halved(torch.autograd.Function):
    """Changes the gradient that it is given in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.mul_(0.5)


class GradientInPlace(nn.Module):
    """The first stage changes the gradient that comes back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](self.blocks[0](x))
        return out


class Scaled(nn.Module):
    """A linear layer whose gradient is halved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Halved.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return out


class Counting(nn.Module):
    """Both stages use a buffer that one of them changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x) + self.steps
        z: Tensor = self.blocks[1](y)
        self.steps.add_(z.detach().sum())
        return z


class InPlace(nn.Module):
    """A block changes what it was given, and the one before has read it already."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        y += self.blocks[1](x)
        return y


class Biased(nn.Module):
    """Adds to what it is given, and keeps nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class ChangedLater(nn.Module):
    """What the second stage is given changes in the first one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), Biased()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        z = self.blocks[1](y)
        y.mul_(2.0)
        return z + y.sum()


class Auxiliary(nn.Module):
    """Every block adds to a loss that the end sums."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for block in self.blocks:
            x = block(x).tanh()
            losses.append(x.square().mean())
        return x + torch.stack(losses).sum()


class Masked(nn.Module):
    """What the batch alone decides is used in every block, and written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask[:, ::2] = 1.0
        mask.mul_(x.detach().sign())
        for block in self.blocks:
            x = block(x) * mask
        return x


def _both(model: nn.Module, stages: int) -> tuple[Tensors, Tensors, Any]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    batches = [{"x": torch.randn(3, 6)} for _ in range(3)]
    step = captured_module(model, batches[0]["x"].shape)
    state = {f"parameter.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    cut = partition(step, by_modules(even_cut(model, stages, "blocks")), stages)
    whole = summed(executable(step).run({**state, **batch}) for batch in batches)
    return whole, in_stages(cut, state, batches, together=True), cut


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("make", [Skip, Auxiliary, Masked])
def test_models_of_ones_own(make: Callable[[], nn.Module], stages: int) -> None:
    whole, staged, _ = _both(make(), stages)
    assert whole.keys() == staged.keys()
    assert all(torch.equal(whole[name], staged[name]) for name in whole)


def test_a_weight_of_two_stages_has_a_part_of_its_gradient_in_each() -> None:
    whole, staged, cut = _both(Shared(), 2)
    assert cut.shared == {"gradient.scale": (0, 1)}
    torch.testing.assert_close(staged, whole, rtol=1e-6, atol=1e-6)


def test_a_weight_that_stages_use_several_times_has_all_parts_of_its_gradient() -> None:
    whole, staged, cut = _both(SharedOften(), 2)
    assert cut.shared == {"gradient.scale": (0, 1)}
    torch.testing.assert_close(staged, whole, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("make", [ChangedBefore, GradientInPlace])
def test_what_was_changed_before_it_is_used_is_sent_as_it_is_then(make: Callable[[], nn.Module]) -> None:
    whole, staged, _ = _both(make(), 2)
    assert all(torch.equal(whole[name], staged[name]) for name in whole)


def test_a_buffer_that_two_stages_use_and_one_changes_is_refused() -> None:
    model = Counting()
    step = captured_module(model, (3, 6))
    with pytest.raises(
        GraphError, match=r"in stage 1 writes to memory that .* in stage 0 uses; put both modules"
    ):
        partition(step, by_modules(even_cut(model, 2, "blocks")), 2)


class Normed(nn.Module):
    """One batch norm behind each block, whose statistics change in each call without its schema saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return x


def test_statistics_of_a_batch_norm_in_two_stages_are_refused() -> None:
    model = Normed()
    step = captured_module(model, (3, 6))
    with pytest.raises(GraphError, match=r"native_batch_norm.* writes to memory that .* uses"):
        partition(step, by_modules(even_cut(model, 2, "blocks")), 2)


def test_what_a_stage_changes_in_place_is_its_own_copy() -> None:
    whole, staged, cut = _both(InPlace(), 2)
    assert all(torch.equal(whole[name], staged[name]) for name in whole)
    (sent,) = cut.stages[0].sends
    assert sent.source == 0
    assert sent.target == 1


def test_what_is_sent_is_not_changed_before_it_leaves() -> None:
    whole, staged, cut = _both(ChangedLater(), 2)
    assert len(cut.stages[0].sends) == 2
    assert all(torch.equal(whole[name], staged[name]) for name in whole)


def test_a_stage_without_work_is_refused() -> None:
    model = Skip()
    step = captured_module(model, (3, 6))
    with pytest.raises(GraphError, match="stage 2 of the pipeline has nothing to compute; use fewer stages"):
        partition(step, by_modules(even_cut(model, 2, "blocks")), 3)


def test_data_sources_know_writes_in_place() -> None:
    model = Masked()
    step = captured_module(model, (3, 6))
    found = label(step, by_modules(even_cut(model, 3, "blocks")), 3)
    sources = data_sources(step)
    written = [node for node in step.nodes if "fill_" in str(node.target) or "mul_" in str(node.target)]
    assert written
    assert set(written) <= found.repeated
    assert any(written[-1] in sources[node] for node in step.nodes if "mul.Tensor" in str(node.target))
