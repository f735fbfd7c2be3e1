"""examples/tiny_step.py: two strategies give the weights of one device, and what was predicted is what runs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from examples.runner import ROOT

FILE = ROOT / "examples/tiny_step.py"


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_step", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_step"] = module
    spec.loader.exec_module(module)
    return module


def _expected(
    tiny: ModuleType, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> dict[str, torch.Tensor]:
    (model(x) - y).square().mean().backward()
    return {
        name: weight.detach() - tiny.LEARNING_RATE * weight.grad for name, weight in model.named_parameters()
    }


def test_it_fits_on_a_few_pages() -> None:
    assert len(FILE.read_text().splitlines()) <= 400
    assert "hyper_parallel" not in FILE.read_text()


def test_it_says_what_it_has_compared(tiny: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.main()
    shown = capsys.readouterr().out
    assert shown.count("the weights are those of one device") == 2
    assert shown.count("(simulated)") == 2


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a_step_is_that_of_one_device(tiny: ModuleType, axis: str, micro_batches: int) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(tiny.Block(16) for _ in range(6)))
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    weights = tiny.train(model, tiny.Strategy(**{axis: 2}, micro_batches=micro_batches), x, y)
    torch.testing.assert_close(weights, _expected(tiny, model, x, y), rtol=1e-5, atol=1e-6)


def test_more_micro_batches_leave_less_waiting_in_a_pipeline(tiny: ModuleType) -> None:
    model = torch.nn.Sequential(*(tiny.Block(256) for _ in range(4)))
    shares = []
    for micro_batches in (1, 8):
        strategy = tiny.Strategy(pipeline=2, micro_batches=micro_batches)
        program = tiny.make_program(tiny.capture(model, strategy, 512, 256), strategy)
        seconds, waited = tiny.simulate(tiny.expand(program))
        shares.append(sum(waited) / seconds)
    assert shares[1] < shares[0] / 2


def test_ranks_that_wait_for_each_other_are_found(tiny: ModuleType) -> None:
    model = torch.nn.Sequential(*(tiny.Block(16) for _ in range(2)))
    strategy = tiny.Strategy(pipeline=2, micro_batches=1)
    program = tiny.make_program(tiny.capture(model, strategy, 4, 16), strategy)
    first, second = program.instructions
    # The first stage would take gradients before it has given values.
    wrong = replace(
        program, instructions=[sorted(first, key=lambda one: getattr(one, "way", "") != "recv"), second]
    )
    with pytest.raises(RuntimeError, match="wait for each other"):
        tiny.simulate(tiny.expand(wrong))
