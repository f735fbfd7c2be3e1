"""A step that cannot be captured says which line stopped it; what looks hard and is not is captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph, capture, executable, phase


class Block(nn.Module):
    """A module of the user's, whose forward is given."""

    def __init__(self, forward: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.told = torch.full((), 2.0)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, self.linear(x))


def _step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    loss = model(x).square().sum()
    with phase("backward"):
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": loss.detach(), **{f"gradient {i}": g for i, g in enumerate(gradients)}}


def _captured(forward: Callable[[Block, Tensor], Tensor]) -> StepGraph:
    # `told` stays a real tensor: nobody knows of it.
    model = nn.Sequential(Block(forward))
    with fake_mode_with_symbols():
        x = torch.empty(4, 3)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                assert parameter is not None
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
        given = {name: ("parameter", p) for name, p in model.named_parameters()}
        return capture(lambda: _step(model, x), {**given, "x": ("input", x)}, model)  # type: ignore[dict-item]


def _asks(self: Block, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def _loops(self: Block, x: Tensor) -> Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x


def _takes_numpy(self: Block, x: Tensor) -> Tensor:
    return x * float(x.detach().numpy().mean())


def _prints(self: Block, x: Tensor) -> Tensor:
    print(x)
    return x


def _formats(self: Block, x: Tensor) -> Tensor:
    assert f"{x.sum()}"
    return x


def _reads_unregistered(self: Block, x: Tensor) -> Tensor:
    return x * self.told


def _scales_by_item(self: Block, x: Tensor) -> Tensor:
    return x * x.detach().max().item()


def _raises(self: Block, x: Tensor) -> Tensor:
    raise ValueError("no luck")


@pytest.mark.parametrize(
    ("forward", "line", "reason"),
    [
        (_asks, "if x.sum() > 0:", r"asks for a tensor's value.*aten"),
        (_loops, "while x.abs().max() > 1:", r"asks for a tensor's value.*aten"),
        (_takes_numpy, "return x * float(x.detach().numpy().mean())", r"Tensor\.numpy shows"),
        (_prints, "print(x)", r"Tensor\.__repr__ shows"),
        (_formats, 'assert f"{x.sum()}"', r"Tensor\.__format__ shows"),
        (_reads_unregistered, "return x * self.told", r"aten\.mul\.Tensor reads.*register_buffer"),
        (_scales_by_item, "return x * x.detach().max().item()", r"depends on the data and is no size"),
        (_raises, 'raise ValueError("no luck")', r"ValueError: no luck"),
    ],
)
def test_the_line_is_named_and_the_module_and_the_reason(
    forward: Callable[[Block, Tensor], Tensor], line: str, reason: str
) -> None:
    source, first = inspect.getsourcelines(forward)
    number = first + next(at for at, text in enumerate(source) if line in text)
    with pytest.raises(CaptureError, match=f"(?s){reason}") as caught:
        _captured(forward)
    assert f"at {__file__}:{number} (`{line}`), in module '0'" in str(caught.value)


def test_a_line_of_transformers_is_named_where_the_user_wrote_none() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    import hyper_parallel as hp
    from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
    from hyper_parallel.step.capture_train_step import BatchShape, capture_step
    from hyper_parallel.step.lr_schedule import schedule
    from hyper_parallel.step.optimizer import build_optimizer
    from hyper_parallel.step.recipe import Recipe

    small = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        experts_implementation="eager",
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(small)
    hp.parallelize(model, hp.Strategy(), lowering="traceable")
    recipe = Recipe(
        model, hp.sharded(model), build_optimizer(model, AdamWConfig()), schedule(ScheduleConfig(), 10)
    )
    with pytest.raises(CaptureError, match=r"modeling_mixtral\.py:\d+ \(`.*in module 'model\.layers\.0\.mlp"):
        capture_step(recipe, BatchShape(((1, 8),), (False,)))


def _chooses(self: Block, x: Tensor) -> Tensor:
    return x[x.detach()[:, 0] > 0].exp()


def _makes_a_constant(self: Block, x: Tensor) -> Tensor:
    return x + torch.tensor([0.5, 1.5, 2.5]).add_(1)


@pytest.mark.parametrize("forward", [_chooses, _makes_a_constant])
def test_masks_and_constants_are_captured(forward: Callable[[Block, Tensor], Tensor]) -> None:
    run = executable(_captured(forward))
    model, x = nn.Sequential(Block(forward)), torch.randn(4, 3)
    for _ in range(2):  # a constant is as it was at the beginning of each run
        found = run.run({**{name: p.detach() for name, p in model.named_parameters()}, "x": x})
        for name, value in _step(model, x).items():
            assert torch.equal(found[name], value), name
