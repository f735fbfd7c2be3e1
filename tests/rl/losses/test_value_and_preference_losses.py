"""The critic's, the preference and the reward model's losses, and the estimators of the KL divergence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.losses.policy import kl_estimate, value_loss
from hyper_parallel.rl.losses.preference import dpo_loss, kto_loss, kto_reference_point, reward_model_loss
from hyper_parallel.rl.losses.reductions import LossSum, metric_means

PAIRS = 6
Part = Callable[[Tensor, slice, float], LossSum]


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OTHERS = [_normal(seed, PAIRS) for seed in range(4)]
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1]])
TOKENS = torch.tensor([3, 2, 1, 4, 5, 2])


def _dpo(kind: str, smoothing: float) -> Part:
    def part(logprobs: Tensor, rows: slice, count: float) -> LossSum:
        return dpo_loss(
            logprobs[rows],
            OTHERS[0][rows],
            reference_chosen=OTHERS[1][rows],
            reference_rejected=OTHERS[2][rows],
            count=count,
            beta=0.7,
            kind=kind,
            label_smoothing=smoothing,
            chosen_tokens=TOKENS[rows],
            rejected_tokens=TOKENS.flip(0)[rows],
        )

    return part


def _kto(logprobs: Tensor, rows: slice, count: float) -> LossSum:
    return kto_loss(
        logprobs[rows],
        reference=OTHERS[0][rows],
        desirable=(OTHERS[3] > 0)[rows],
        reference_point=0.2,
        count=count,
        beta=0.7,
        undesirable_weight=1.4,
    )


def _reward(scores: Tensor, rows: slice, count: float) -> LossSum:
    return reward_model_loss(
        scores[rows], OTHERS[0][rows], count=count, margin=OTHERS[1][rows].abs(), centering=0.1
    )


def _value(values: Tensor, rows: slice, count: float) -> LossSum:
    spread = values[:, None] * torch.arange(1, 4)
    return value_loss(
        spread[rows],
        old_values=(spread.detach() + 0.3 * _normal(9, PAIRS, 3))[rows],
        returns=_normal(10, PAIRS, 3)[rows],
        mask=MASK[rows],
        count=count,
    )


LOSSES = {
    "sigmoid": _dpo("sigmoid", 0.0),
    "smoothed": _dpo("sigmoid", 0.2),
    "robust": _dpo("robust", 0.2),
    "ipo": _dpo("ipo", 0.0),
    "kto": _kto,
    "reward": _reward,
    "value": _value,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradient_is_that_of_finite_differences(loss: Part) -> None:
    fixed = _value(_normal(8, PAIRS), slice(None), 5.0)
    assert fixed.loss > 0
    inputs = _normal(8, PAIRS).requires_grad_()
    if loss is _value:  # its old values would move with the values
        old = _normal(8, PAIRS, 3)

        def alone(values: Tensor) -> Tensor:
            return value_loss(
                values, old_values=old, returns=_normal(10, PAIRS, 3), mask=MASK, count=5.0
            ).loss

        assert torch.autograd.gradcheck(
            alone, (old + 0.3 * _normal(9, PAIRS, 3)).requires_grad_(), eps=1e-7, atol=1e-6
        )
        return
    assert torch.autograd.gradcheck(
        lambda given: loss(given, slice(None), 5.0).loss, inputs, eps=1e-7, atol=1e-6
    )


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@given(cut=st.integers(1, PAIRS - 1))
@settings(max_examples=5)
def test_micro_batches_add_up_to_the_whole_batch(loss: Part, cut: int) -> None:
    inputs = _normal(8, PAIRS)
    whole = loss(inputs, slice(None), 6.0)
    parts = [loss(inputs, rows, 6.0) for rows in (slice(0, cut), slice(cut, None))]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    together, alone = metric_means(parts), metric_means([whole])
    assert together == pytest.approx(alone)


def test_label_smoothing_is_a_share_of_swapped_labels() -> None:
    chosen, rejected, first, second = OTHERS
    references = {"reference_chosen": first, "reference_rejected": second, "count": 1.0}
    swapped = {"reference_chosen": second, "reference_rejected": first, "count": 1.0}
    right = dpo_loss(chosen, rejected, **references).loss
    wrong = dpo_loss(rejected, chosen, **swapped).loss
    smoothed = dpo_loss(chosen, rejected, label_smoothing=0.2, **references).loss
    torch.testing.assert_close(smoothed, 0.8 * right + 0.2 * wrong)
    # Robust DPO is unbiased: over labels that are wrong with that share its mean is the loss of the right ones.
    robust = [
        dpo_loss(a, b, kind="robust", label_smoothing=0.2, **c).loss
        for a, b, c in ((chosen, rejected, references), (rejected, chosen, swapped))
    ]
    torch.testing.assert_close(0.8 * robust[0] + 0.2 * robust[1], right)


@pytest.mark.parametrize(
    ("chosen", "needed"),
    [
        ({"kind": "hinge"}, "one of sigmoid"),
        ({"beta": 0.0}, "above 0"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"kind": "ipo"}, "ipo needs chosen_tokens"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "take sigmoid or robust"),
    ],
)
def test_settings_of_dpo_that_cannot_be(chosen: dict[str, object], needed: str) -> None:
    one = torch.zeros(2)
    with pytest.raises(ConfigError, match=needed):
        dpo_loss(one, one, reference_chosen=one, reference_rejected=one, count=2, **chosen)


def test_reference_point_of_kto_is_never_negative() -> None:
    assert float(kto_reference_point(torch.tensor([-3.0, -1.0]), torch.tensor([-5.0, -2.0]))) == 1.5
    assert float(kto_reference_point(torch.tensor([-5.0]), torch.tensor([-2.0]))) == 0.0


def test_value_clip_of_one_token() -> None:
    """The old value 0 and the return 2: a value of 1 counts as 0.2 with the clip, and has no gradient."""
    value = torch.ones(1, 1, requires_grad=True)
    zero, here = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    part = value_loss(value, old_values=zero, returns=zero + 2, mask=here, count=1, clip=0.2)
    assert part.loss.item() == pytest.approx(0.5 * 1.8**2)
    assert metric_means([part]) == pytest.approx({"value_error": 1.0, "value_clipped": 1.0})
    part.loss.backward()
    assert value.grad is not None
    assert float(value.grad) == 0
    free = value_loss(value, old_values=zero, returns=zero + 2, mask=here, count=1, clip=None)
    assert free.loss.item() == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="above 0"):
        value_loss(value, old_values=zero, returns=zero, mask=here, count=1, clip=0.0)


def test_kl_estimators_over_a_whole_distribution() -> None:
    """The expectation of k1 and of k3 under π is the divergence; the gradient of k2's is that of the divergence."""
    logits, other = _normal(1, 1, 7).requires_grad_(), _normal(2, 1, 7)
    policy, reference = logits.log_softmax(-1), other.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        mean = (policy.exp() * kl_estimate(policy, reference, estimator)).sum()
        torch.testing.assert_close(mean, exact)
    assert kl_estimate(policy, reference, "k3").min() >= 0
    sampled = (policy.exp().detach() * kl_estimate(policy, reference, "k2")).sum()
    (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits, retain_graph=True)[0])
    first = (policy.exp().detach() * kl_estimate(policy, reference, "k1")).sum()
    assert torch.autograd.grad(first, logits)[0].abs().max() < 1e-12
    with pytest.raises(ConfigError, match="one of k1, k2, k3"):
        kl_estimate(policy, reference, "k4")
