"""Objectives over tokens' log-probabilities on every axis: log-probabilities and gradients are those of one device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import hyper_parallel as hp
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.loss import IGNORED, token_logprobs, token_loss


@dataclass
class Squares:
    """Any function that is not linear in the log-probabilities."""

    temperature: float
    inputs: tuple[Tensor, ...]

    def __call__(self, logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
        return (weights_N * (logprobs_N + logprobs_N.square() / 10)).sum()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (4, 12), generator=generator)
    labels = torch.randint(32, (4, 12), generator=generator)
    labels[:, :5] = IGNORED
    labels[1, 9:] = IGNORED
    weights = torch.randn(4, 12, generator=generator)
    return ids, labels, torch.arange(12).expand(4, 12).contiguous(), weights


def plain(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the loss, without our code."""
    ids, labels, positions, weights = batch()
    logits = model(ids, position_ids=positions, use_cache=False).logits / temperature
    valid = labels != IGNORED
    logprobs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * valid
    return logprobs, (weights * (logprobs + logprobs.square() / 10)).sum()


@pytest.mark.parametrize("chunk", ["none", 7])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_device(chunk: Any, temperature: float) -> None:
    reference, model = llama(), llama()
    expected, loss = plain(reference, temperature)
    loss.backward()
    hp.parallelize(model, hp.Strategy())
    ids, labels, positions, weights = batch()
    found = token_loss(
        model, ids, labels, positions, Squares(temperature, (weights,)), chunk=LossConfig(chunk=chunk)
    )
    found.backward()
    torch.testing.assert_close(found, loss.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        token_logprobs(model, ids, labels, positions, temperature), expected.detach(), atol=1e-5, rtol=0
    )
    for (name, own), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        full = own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad
        torch.testing.assert_close(full, other.grad, atol=2e-6, rtol=1e-4, msg=name)


def test_a_model_without_its_own_loss_is_refused() -> None:
    ids, labels, positions, weights = batch()
    with pytest.raises(StrategyError, match="parallelized"):
        token_loss(copy.deepcopy(llama()), ids, labels, positions, Squares(1.0, (weights,)))
