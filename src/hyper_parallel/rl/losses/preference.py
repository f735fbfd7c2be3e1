"""Preference losses: DPO, IPO, KTO, and the Bradley-Terry loss of a reward model.

With h = log π(y|x) − log ρ(y|x) of an answer (sums over its tokens), w the preferred and l the other answer of a pair,
δ = h_w − h_l, σ the logistic function, ε the label smoothing:

    sigmoid    −(1 − ε) log σ(β δ) − ε log σ(−β δ)               DPO (arXiv 2305.18290), equation 7; ε: E. Mitchell,
                                                                 "A note on DPO with noisy preferences" (2023)
    robust     (−(1 − ε) log σ(β δ) + ε log σ(−β δ)) / (1 − 2ε)  robust DPO (arXiv 2403.00409), section 3
    ipo        (h_w / |w| − h_l / |l| − 1 / (2β))²               IPO (arXiv 2310.12036), equation 17; over the lengths,
                                                                 which its authors confirmed to TRL
    KTO        λ_D (1 − σ(β (h − z)))  desirable                 KTO (arXiv 2402.01306), section 4
               λ_U (1 − σ(β (z − h)))  undesirable
               z = max(0, mean of h of mismatched answers)       `kto_reference_point`
    reward     −log σ(s_w − s_l − margin) + c (s_w + s_l)²       InstructGPT (arXiv 2203.02155), equation 1; margin:
                                                                 Llama 2 (arXiv 2307.09288), equation 2; c centres the
                                                                 scores (arXiv 2312.09244)

Each returns its sum over the micro-batch, divided by the number of pairs (of KTO: of answers) of the whole step.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.losses.reductions import LossSum, divided, floats, require_shape

Preference = Literal["sigmoid", "robust", "ipo"]


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    count: float | Tensor,
    beta: float = 0.1,
    kind: Preference = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
) -> LossSum:
    """A micro-batch's share of the loss of pairs, from log-probabilities of whole answers [pairs], in nats.

    `chosen` and `rejected` have the gradient. `chosen_tokens` and `rejected_tokens` [pairs], the numbers of their
    tokens, are of `ipo` alone. Metrics: `accuracy` (δ > 0), `margin` (β δ), `chosen_reward`, `rejected_reward` (β h).

    Raises ConfigError for shapes that differ, an unknown kind, and coefficients that it does not have.
    """
    for name, tensor in (
        ("log-probabilities of rejected answers", rejected),
        ("reference's log-probabilities of chosen answers", reference_chosen),
        ("reference's log-probabilities of rejected answers", reference_rejected),
    ):
        require_shape(name, tensor, chosen)
    _check_preference(kind, beta, label_smoothing)
    better = floats(chosen) - floats(reference_chosen.detach())
    worse = floats(rejected) - floats(reference_rejected.detach())
    scaled = beta * (better - worse)
    if kind == "ipo":
        if chosen_tokens is None or rejected_tokens is None:
            raise ConfigError("got no numbers of tokens; ipo needs chosen_tokens and rejected_tokens")
        require_shape("numbers of chosen tokens", chosen_tokens, chosen)
        require_shape("numbers of rejected tokens", rejected_tokens, chosen)
        means = better / chosen_tokens.clamp(min=1) - worse / rejected_tokens.clamp(min=1)
        losses = (means - 1 / (2 * beta)).square()
    elif kind == "robust":
        losses = -(1 - label_smoothing) * logsigmoid(scaled) + label_smoothing * logsigmoid(-scaled)
        losses = losses / (1 - 2 * label_smoothing)
    else:
        losses = -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
    return LossSum(
        loss=divided(losses.sum(), count),
        weight=torch.tensor(chosen.shape[0]),
        sums={
            "accuracy": (scaled.detach() > 0).sum(),
            "margin": scaled.detach().sum(),
            "chosen_reward": beta * better.detach().sum(),
            "rejected_reward": beta * worse.detach().sum(),
        },
    )


def _check_preference(kind: Preference, beta: float, label_smoothing: float) -> None:
    if kind not in get_args(Preference):
        raise ConfigError(f"got preference loss {kind!r}; need one of {', '.join(get_args(Preference))}")
    if beta <= 0:
        raise ConfigError(f"got beta {beta}; need a number above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"got label_smoothing {label_smoothing}; need a share of wrong labels from 0 to less than 0.5"
        )
    if kind == "ipo" and label_smoothing:
        raise ConfigError(
            f"got label_smoothing {label_smoothing} with ipo, which has none; take sigmoid or robust"
        )


def kto_reference_point(logprobs: Tensor, reference: Tensor) -> Tensor:
    """z of KTO: the mean of h over answers paired with prompts that are not theirs, or 0 where negative; no gradient.

    Both are log-probabilities of whole answers [answers] of the whole step.
    """
    require_shape("the reference's log-probabilities", reference, logprobs)
    return (floats(logprobs.detach()) - floats(reference.detach())).mean().clamp(min=0)


def kto_loss(
    logprobs: Tensor,
    *,
    reference: Tensor,
    desirable: Tensor,
    reference_point: float | Tensor,
    count: float | Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossSum:
    """A micro-batch's share of the loss of single answers, from their log-probabilities [answers], in nats.

    `desirable` [answers] is bool. Metrics: `desirable` (share) and `reward` (β h).
    """
    require_shape("the reference's log-probabilities", reference, logprobs)
    require_shape("labels", desirable, logprobs)
    if beta <= 0:
        raise ConfigError(f"got beta {beta}; need a number above 0")
    ratios = floats(logprobs) - floats(reference.detach())
    point = torch.as_tensor(reference_point, dtype=ratios.dtype, device=ratios.device).detach()
    wanted = desirable.bool()
    gain = torch.where(wanted, ratios - point, point - ratios)
    weights = torch.where(wanted, desirable_weight, undesirable_weight).to(ratios.dtype)
    return LossSum(
        loss=divided((weights * (1 - torch.sigmoid(beta * gain))).sum(), count),
        weight=torch.tensor(logprobs.shape[0]),
        sums={"desirable": wanted.sum(), "reward": beta * ratios.detach().sum()},
    )


def reward_model_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    count: float | Tensor,
    margin: Tensor | None = None,
    centering: float = 0.0,
) -> LossSum:
    """A micro-batch's share of the loss of a reward model, from its scores of both answers [pairs].

    `margin` [pairs] is by how much the scores should differ. Metrics: `accuracy`, `margin` (of the scores), `score`.
    """
    require_shape("scores of rejected answers", rejected, chosen)
    better, worse = floats(chosen), floats(rejected)
    difference = better - worse
    wanted = difference
    if margin is not None:
        require_shape("margins", margin, chosen)
        wanted = difference - floats(margin)
    losses = -logsigmoid(wanted)
    if centering:
        losses = losses + centering * (better + worse).square()
    return LossSum(
        loss=divided(losses.sum(), count),
        weight=torch.tensor(chosen.shape[0]),
        sums={
            "accuracy": (difference.detach() > 0).sum(),
            "margin": difference.detach().sum(),
            "score": (better + worse).detach().sum() / 2,
        },
    )
