"""The loss: against its definition, and independent of how a batch is cut up."""

from __future__ import annotations

import torch

from hyper_parallel.train import causal_lm_loss, valid_tokens


def _case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 11, generator=generator)
    labels = torch.randint(0, 11, (4, 6), generator=generator)
    labels[0, :5] = -100  # a row with one valid token, so that a mean over rows would differ
    labels[2, 3] = -100
    return logits, labels


def test_it_is_the_mean_over_valid_tokens() -> None:
    logits, labels = _case()
    expected = [
        -logits[b, s].log_softmax(-1)[labels[b, s]]
        for b in range(4)
        for s in range(6)
        if labels[b, s] != -100
    ]
    assert int(valid_tokens(labels)) == len(expected) == 18
    torch.testing.assert_close(causal_lm_loss(logits, labels, 18), torch.stack(expected).mean())


def test_parts_sum_to_the_whole() -> None:
    logits, labels = _case()
    tokens = valid_tokens(labels)
    parts = sum(causal_lm_loss(logits[i : i + 1], labels[i : i + 1], tokens) for i in range(4))
    torch.testing.assert_close(parts, causal_lm_loss(logits, labels, tokens))


def test_low_precision_logits_are_computed_with_in_fp32() -> None:
    logits, labels = _case()
    low = logits.bfloat16()
    assert causal_lm_loss(low, labels, 18).dtype == torch.float32
    torch.testing.assert_close(
        causal_lm_loss(low, labels, 18), causal_lm_loss(low.float(), labels, 18), rtol=0, atol=0
    )


def test_a_part_without_valid_tokens_adds_nothing() -> None:
    logits, labels = _case()
    logits.requires_grad_()
    loss = causal_lm_loss(logits, torch.full_like(labels, -100), 18)
    loss.backward()
    assert loss == 0 and not logits.grad.any()
