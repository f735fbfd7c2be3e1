"""One step: accumulation, the loss's divisor, and batches that bear no loss."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from tiny_run import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from harness.updates import Tensors, adamw_error, gradients_of
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.errors import DataError
from hyper_parallel.launch.stop import Requests
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import Stepper, accumulate
from hyper_parallel.strategy import Strategy


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    return parallelize(LlamaForCausalLM(LlamaConfig(vocab_size=64, **settings)), Strategy())


def _batch(micro: int, ignored: slice = slice(0, 0)) -> StepBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (8, 17), generator=generator)
    labels = ids[:, 1:].clone()
    labels[1, 4:] = labels[5] = -100  # micro-batches with different numbers of valid tokens
    labels[ignored] = -100
    positions = torch.arange(16).expand(8, 16)
    parts = [
        MicroBatch(
            ids[at : at + micro, :-1],
            labels[at : at + micro],
            positions[:micro],
            torch.arange(at, at + micro),
        )
        for at in range(0, 8, micro)
    ]
    return StepBatch(0, list(range(8)), parts, (labels != -100).sum().float())


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_equals_one_big_batch(micro: int) -> None:
    big, small = _model(), _model()
    expected = accumulate(big, sharded(big), _batch(8), _batch(8).tokens, seed=0)
    found = accumulate(small, sharded(small), _batch(micro), _batch(micro).tokens, seed=0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for (name, mine), (_, theirs) in zip(small.named_parameters(), big.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=0, msg=name)


def _stepper(model: LlamaForCausalLM, clip: float | None = None) -> Stepper:
    return Stepper(_recipe(model, clip))


def _recipe(model: LlamaForCausalLM, clip: float | None = None) -> Recipe:
    scale = schedule(ScheduleConfig(name="constant"), 4)
    return Recipe(
        model, sharded(model), build_optimizer(model, AdamWConfig(lr=0.01)), scale, seed=0, clip=clip
    )


def test_a_step_is_that_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    plain = copy.deepcopy(LlamaForCausalLM(model.config))
    plain.load_state_dict(model.state_dict())
    decayed = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    recipe = _recipe(model, clip=0.5)
    mine: list[Tensors] = []
    theirs: list[Tensors] = []
    step_of_recipe = recipe.optimizer.step

    def step_seen(scale: float) -> None:
        mine.append(gradients_of(model))
        step_of_recipe(scale)

    monkeypatch.setattr(recipe.optimizer, "step", step_seen)
    stepper = Stepper(recipe)
    stepper.begin(_batch(8))
    for step in range(3):
        batch = _batch(8).micro[0]
        logits = plain(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.append(gradients_of(plain))
        optimizer.step()
        optimizer.zero_grad()
        result = stepper.run(
            load_next=lambda: _batch(8), memory=5.0, requests=functools.partial(Requests, stop=step == 1)
        )
        assert result.loss == pytest.approx(loss.item(), abs=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), abs=1e-6)
        assert result.tokens == 8 * 16 - 12 - 16
        assert result.stop == (step == 1) and result.memory == 5.0
        for name, gradient in theirs[-1].items():
            torch.testing.assert_close(mine[-1][name], gradient, atol=1e-6, rtol=0, msg=name)
    allowed = adamw_error(mine, theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    values = dict(plain.named_parameters())
    for name, value in model.named_parameters():
        off = (value - values[name]).detach().abs()
        worst = (off - allowed[name]).max()
        assert worst <= 1e-6, f"{name} is off by {worst:.1e} more than its gradients account for"


def test_a_batch_without_loss_is_an_error_before_the_optimizer() -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    stepper = _stepper(model)
    stepper.begin(_batch(4, ignored=slice(None)))
    with pytest.raises(
        DataError, match=r"step 1: no token of the batch bears loss \(rows 0, 1, 2, 3, 4, 5, 6, 7\)"
    ):
        stepper.run(load_next=None, memory=0.0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_finite_batch_with_an_overflowing_norm_names_the_largest_gradient() -> None:
    model = _model()
    handle = sharded(model)
    accumulate(model, handle, _batch(8), _batch(8).tokens, seed=0)
    from hyper_parallel.step.nonfinite_report import non_finite

    parameter = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    parameter.grad[0, 0] = 1e15
    said = str(non_finite(handle, 4, list(range(20)), 3.0, float("inf")))
    assert "step 5: the loss is 3 and the gradient norm inf" in said
    assert "every gradient is finite, the largest is that of 'model.layers.1.mlp.up_proj.weight'" in said
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7 and 12 more" in said
    parameter.grad[0, :3] = float("nan")
    assert (
        "worst gradient is that of 'model.layers.1.mlp.up_proj.weight', 0.195% of it not finite, and 1 of "
        in str(non_finite(handle, 4, [1], float("nan"), float("nan")))
    )
