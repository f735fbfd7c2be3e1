"""A loop of a person's own under `hp.offload` beside the same loop without: every loss, gradient and value."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, at_the_floor, batch_of, model_of, same, trained
from torch import nn

import hyper_parallel as hp
from hyper_parallel.offloading.autograd.two_passes import Run

BATCHES = [batch_of(seed=step) for step in range(3)]


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(f, marks=pytest.mark.matrix, id=f"{f}-searched") for f in ("llama", "gpt2"))],
)
def test_the_smallest_budget_holds_and_changes_no_bit(family: str, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"flash": tmp_path} if family == "gpt2" else {"host": "16MiB"}
    free = trained(model_of(family), BATCHES, observed=True)
    moved, budget = at_the_floor(
        lambda: model_of(family), lambda model: trained(model, BATCHES, True), **tiers
    )
    assert same(moved, free)
    # In the first two steps plans are made, on tensors without memory that an observer takes for real ones.
    assert max(moved.peaks[2:]) <= budget < max(free.peaks[2:])
    assert not list(tmp_path.iterdir())


def test_results_that_nobody_keeps_make_room() -> None:
    def make() -> nn.Module:
        return model_of("llama", vocab_size=256)

    def run(model: nn.Module) -> Any:
        return trained(model, BATCHES, observed=True)

    kept, much = at_the_floor(make, run, host="16MiB")
    moved, less = at_the_floor(make, run, host="16MiB", keep_results=False)
    logits = BATCHES[0]["input_ids"].numel() * 256 * 4
    assert same(moved, kept)
    assert moved.peaks[2] <= less < much - 0.9 * logits


def test_padding_is_seen_in_the_mask_and_has_a_plan_of_its_own() -> None:
    batches = [batch_of(seed=step, padded=3 * (step % 2)) for step in range(4)]
    model = hp.offload(model_of("llama"), budget="4MiB", host="4MiB")
    assert same(trained(model, batches), trained(model_of("llama"), batches))
    assert len(model.forward.notes) == 3  # the first mask without moments and with, and the second


def test_each_shape_has_a_plan_and_each_plan_is_kept() -> None:
    shapes = [(4, 32), (2, 16), (4, 32), (2, 16), (4, 32)]
    batches = [batch_of(*shape, seed=step) for step, shape in enumerate(shapes)]
    model = hp.offload(model_of("llama"), budget="400KiB", host="16MiB")
    assert same(trained(model, batches), trained(model_of("llama"), batches))
    assert len(model.forward.notes) == 3  # the first one without moments and with, and the second


def test_gradients_add_up_over_calls_and_may_be_reset_between_the_passes() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        found = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(**BATCHES[step % 3], use_cache=False).loss
            if step == 3:
                optimizer.zero_grad()
            loss.backward()
            found += [p.grad.clone() for p in model.parameters()]
            if step % 2:
                optimizer.step()
        return found

    moved, _ = at_the_floor(lambda: model_of("llama"), run, host="16MiB")
    assert all(torch.equal(a, b) for a, b in zip(moved, run(model_of("llama")), strict=True))


def test_autocast_is_followed() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        for batch in BATCHES[:2]:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch, use_cache=False).loss
            loss.backward()
        loss = model(**BATCHES[0], use_cache=False).loss  # and its absence
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    moved, _ = at_the_floor(lambda: model_of("llama"), run, host="16MiB")
    assert all(torch.equal(a, b) for a, b in zip(moved, run(model_of("llama")), strict=True))


class Precise(nn.Module):
    """Half of it computes in float32 whatever the caller says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.last(middle.float())


def test_what_the_model_keeps_out_of_autocast_stays_out() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(0)))
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in model.parameters())]

    moved = run(hp.offload(Precise(), budget="1MiB", host="1MiB"))
    assert all(torch.equal(a, b) for a, b in zip(moved, run(Precise()), strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_checkpointed_layers_are_computed_again_with_the_same_dropout(family: str) -> None:
    def make() -> nn.Module:
        model: Any = model_of(family)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    moved = hp.offload(make(), budget="1GiB", host="1MiB")
    plain = hp.offload(model_of(family), budget="1GiB", host="1MiB")
    ran = trained(moved, BATCHES[:2], observed=True), trained(plain, BATCHES[:2], observed=True)
    assert same(ran[0], trained(make(), BATCHES[:2]))
    for model, count in ((moved, 1), (plain, 0)):
        steps = [ready.passes.step for known in model.forward._plans._known.values() for ready in known]
        assert any(node.meta["recomputed"] for step in steps for node in step.nodes) == bool(count)


class Normed(nn.Module):
    """Running statistics are written to in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        middle = self.norm(self.first(x)).relu()
        return self.last(middle).pow(2).mean(), {"middle": middle}


def test_buffers_that_the_model_writes_and_gradients_of_inputs() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for _ in range(3):
            loss, _ = model(2 * x)
            loss.backward()
        return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]

    moved, _ = at_the_floor(Normed, run, host="1MiB")
    assert all(torch.equal(a, b) for a, b in zip(moved, run(Normed()), strict=True))


def test_a_loss_of_ones_own_and_parameters_between_the_passes() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        for batch in BATCHES[:2]:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            assert all(p.untyped_storage().nbytes() for p in model.parameters())
            weights = sum(p.square().sum() for p in model.parameters())
            loss = (
                nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 1e-3 * weights
            )
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    # What the loop holds itself, a sum over all parameters, is beside the budget.
    moved, _ = at_the_floor(lambda: model_of("llama"), run, host="16MiB")
    assert all(torch.equal(a, b) for a, b in zip(moved, run(model_of("llama")), strict=True))


def test_equal_gradients_are_memory_of_their_own() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a + self.b

    model, given = hp.offload(Sum(), budget="1MiB", host="1MiB"), torch.full((8,), 3.0)
    for count in (1, 2):
        model(torch.ones(8)).backward(given)
        assert [p.grad.tolist() for p in model.parameters()] == [[3.0 * count] * 8] * 2
        assert given.tolist() == [3.0] * 8


def test_parameters_that_share_their_memory_stay_where_they_are() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        flat = torch.cat([layer.weight.detach().flatten() for layer in model])
        for layer, part in zip(model, flat.split(64 * 64), strict=True):
            layer.weight.data = part.view(64, 64)
        return model

    def run(model: nn.Module) -> list[torch.Tensor]:
        model(torch.randn(512, 64, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        return [p.grad for p in model.parameters()]

    moved, _ = at_the_floor(make, run, host="16MiB")
    assert all(torch.equal(a, b) for a, b in zip(moved, run(make()), strict=True))


def test_evaluation_is_the_models_own() -> None:
    model = hp.offload(model_of("gpt2"), budget="400KiB", host="16MiB")
    model(**BATCHES[0]).loss.backward()
    plans = len(model.forward.notes)
    own = model_of("gpt2").eval()
    with torch.no_grad():
        assert torch.equal(model.eval()(**BATCHES[1]).loss, own(**BATCHES[1]).loss)
        told = model.generate(BATCHES[0]["input_ids"][:, :4], max_new_tokens=4, do_sample=False)
    assert told.shape == (4, 8)
    assert len(model.forward.notes) == plans


def test_transformers_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    words = Path(argparse.__file__).read_bytes()
    rows = [
        {"input_ids": [b % 64 for b in words[i : i + 24]], "labels": [b % 64 for b in words[i : i + 24]]}
        for i in range(0, 24 * 32, 24)
    ]

    def run(model: nn.Module, name: str) -> list[float]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            seed=3,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = hp.offload(model_of("llama"), budget="500KiB", host="16MiB")
    own = model_of("llama")
    assert run(model, "moved") == run(own, "own")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), own.parameters(), strict=True))


@pytest.mark.matrix
def test_the_example_runs() -> None:
    path = Path(__file__).parents[2] / "examples" / "offload_loop.py"
    spec = importlib.util.spec_from_file_location("offload_loop", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    moved, notes = example.train(3, "14MiB")
    assert moved == example.train(3, None)[0]
    assert len(notes) == 2


def test_gradients_that_a_thread_of_gloo_still_holds_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.Tensor] = []
    send = Run._send

    def holding(run: Run, answer: Any) -> Any:
        try:
            return send(run, answer)
        except StopIteration as stop:
            held.extend(stop.value)
            raise

    monkeypatch.setattr(Run, "_send", holding)
    model = hp.offload(model_of("llama"), budget="16MiB", host="16MiB")
    model(**BATCHES[0]).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    given = {tensor.untyped_storage().data_ptr() for tensor in held}
    assert {gradient.untyped_storage().data_ptr() for gradient in gradients} <= given
