"""The clipped policy objective of PPO, GRPO, RLOO and DAPO, for samples of the current or of an older policy.

With π the policy that is trained, μ the one that drew the token (behaviour), π_old the trainer's own before this step's
updates (proximal), A the advantage, and clip(r) = min(max(r, 1 − clip_low), 1 + clip_high):

    L(r) = −min(r A, clip(r) A)            PPO (arXiv 1707.06347), equation 7; two bounds: DAPO (arXiv 2503.14476)
    min(L(r), −c A) where A < 0            dual clip (arXiv 1912.09729), its section on dual-clip PPO; TRL's `delta`

    behaviour    L(π / μ)
    decoupled    sg(π_old / μ) L(π / π_old)
                                           decoupled PPO (arXiv 2110.00641), section 3; AReaL (arXiv 2505.24298),
                                           section 5.2; with `weight_cap` tokens of a larger weight are dropped, as
                                           in its code
    truncated    sg(min(π_old / μ, weight_cap)) L(π / π_old)
                                           truncated importance sampling: F. Yao et al., "Your efficient RL framework
                                           secretly brings you off-policy RL training" (2025)

sg: without a gradient. The ratio r and the weight are those of

    token               exp(d_t), with d_t the difference of the log-probabilities of token t
    sequence_mean       exp(Σ_t d_t / |o|)        GSPO (arXiv 2507.18071), section 4
    sequence_product    exp(Σ_t d_t)              RLOO (arXiv 2402.14740): the whole answer is one action; TRL's RLOO

The loss adds kl · KL(π ‖ ρ) and subtracts entropy · H for each token, and sums tokens as `reductions` says. Exponents
are limited to ±20 nats, so that no token makes the loss infinite; beyond them a token has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.losses.reductions import (
    LossSum,
    Normalization,
    divided,
    floats,
    reduce_tokens,
    require_shape,
    trained_tokens,
)

# Estimators of the KL divergence from the policy π to a reference ρ, of tokens that the policy drew.
#
# J. Schulman, "Approximating KL divergence" (2020), with d = log π − log ρ of a drawn token:
#
#     k1 = d                 unbiased; as a loss its gradient has mean 0, so it serves in rewards alone
#     k2 = d² / 2            biased, but its gradient is that of KL(π ‖ ρ) when π drew the token
#     k3 = e^{−d} + d − 1    unbiased, never negative; GRPO's (arXiv 2402.03300, equation 4)

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """The estimate of each token, in nats, from its log-probabilities under the policy and the reference; same shape.

    Differentiable in `logprobs`. Raises ConfigError for an unknown estimator.
    """
    require_shape("the reference's log-probabilities", reference, logprobs)
    difference = floats(logprobs) - floats(reference.detach())
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ConfigError(f"got KL estimator {estimator!r}; need one of {', '.join(get_args(Estimator))}")


Objective = Literal["behaviour", "decoupled", "truncated"]
Ratio = Literal["token", "sequence_mean", "sequence_product"]

LIMIT = 20.0
"""Of the exponent of a ratio, in nats."""


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """Which objective, and its coefficients. Raises ConfigError for values that contradict each other."""

    objective: Objective = "behaviour"
    ratio: Ratio = "token"
    clip_low: float = 0.2
    """The ratio is clipped at 1 − this."""
    clip_high: float = 0.2
    """And at 1 + this."""
    dual_clip: float | None = None
    """Largest ratio that a negative advantage is multiplied with; None for no limit."""
    weight_cap: float | None = None
    """Largest π_old / μ: `truncated` uses it instead of a larger one, `decoupled` drops the token."""
    normalization: Normalization = "grpo"
    kl: float = 0.0
    """Coefficient of the KL divergence to the reference."""
    kl_estimator: Estimator = "k3"
    entropy: float = 0.0
    """Coefficient of the entropy, which is rewarded."""

    def __post_init__(self) -> None:
        for name, kinds in (
            ("objective", Objective),
            ("ratio", Ratio),
            ("normalization", Normalization),
            ("kl_estimator", Estimator),
        ):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(
                    f"got {name} {getattr(self, name)!r}; need one of {', '.join(get_args(kinds))}"
                )
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ConfigError(
                f"got clip_low {self.clip_low} and clip_high {self.clip_high}; need clip_low from 0 to 1 and clip_high "
                "of 0 or more"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError(
                f"got dual_clip {self.dual_clip}; need more than 1 + clip_high, {1 + self.clip_high}, because it "
                "limits what is beyond the clip"
            )
        if (self.objective == "truncated") != (self.weight_cap is not None) and self.objective != "decoupled":
            raise ConfigError(
                f"got weight_cap {self.weight_cap} with objective {self.objective}; truncated needs one (2 is usual), "
                "behaviour has no weights to limit"
            )
        if self.weight_cap is not None and self.weight_cap <= 0:
            raise ConfigError(f"got weight_cap {self.weight_cap}; need a number above 0")
        if self.kl < 0 or self.entropy < 0:
            raise ConfigError(f"got kl {self.kl} and entropy {self.entropy}; need coefficients of 0 or more")
        if self.kl != 0 and self.kl_estimator == "k1":
            raise ConfigError(
                "got kl_estimator k1 for the loss, where its gradient has mean 0; take k2 or k3, or subtract k1 from "
                "the rewards and set kl to 0"
            )


def policy_loss(
    logprobs: Tensor,
    *,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    count: float | Tensor,
    settings: PolicyObjective,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossSum:
    """A micro-batch's share of the loss of a step, and the sums of its metrics over trained tokens.

    Log-probabilities of the drawn tokens, in nats, are [sequences, tokens]: `logprobs` of the policy that is trained
    (with a gradient), `behaviour` as the rollout recorded them, `proximal` those of the trainer before the step's
    updates, `reference` of the reference; only `logprobs` and `entropy` (of each token's distribution, in nats) get a
    gradient. `advantages` are [sequences] or [sequences, tokens]. `mask` has 1 where the policy drew the token and it
    is trained; what stands elsewhere, even NaN, changes nothing. `count` is the sum of `loss_count` over the step.

    Metrics: `ratio`, `clipped_low` and `clipped_high` (share of tokens without a gradient because of the clip),
    `dual_clipped`, `approx_kl` (k3 of π against the ratio's denominator), `behaviour_gap` (|log π − log μ|, nats per
    token), and, of what is given, `proximal_gap` (|log π_old − log μ|), `weight`, `weight_capped`, `reference_kl`,
    `entropy`.

    Raises ConfigError for shapes that differ and for a tensor that the objective needs and does not get.
    """
    terms, metrics = policy_terms(
        logprobs,
        behaviour=behaviour,
        advantages=advantages,
        mask=mask,
        settings=settings,
        proximal=proximal,
        reference=reference,
        entropy=entropy,
    )
    trained = trained_tokens(mask)
    return LossSum(
        loss=reduce_tokens(terms, trained, settings.normalization, count),
        weight=trained.sum(),
        sums={
            name: torch.where(trained, floats(value.detach()), 0.0).sum() for name, value in metrics.items()
        },
    )


def policy_terms(
    logprobs: Tensor,
    *,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: PolicyObjective,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The term of each token before sums are taken, and the metrics of each token; arguments as of `policy_loss`.

    With `ratio: token` a token's term needs nothing of other tokens, and tensors may be [tokens]: a part of the
    positions of a micro-batch. With the other ratios they are [sequences, tokens].
    """
    trained = trained_tokens(mask)
    require_shape("log-probabilities", logprobs, mask)
    current = _kept("log-probabilities", logprobs, trained)
    drawn = _kept("behaviour log-probabilities", behaviour.detach(), trained)
    per_answer = advantages.dim() == 1 and mask.dim() == 2
    advantage = advantages.detach()[:, None].expand(mask.shape) if per_answer else advantages.detach()
    advantage = _kept("advantages", advantage, trained)
    anchor = drawn
    if proximal is not None:
        old = _kept("proximal log-probabilities", proximal.detach(), trained)
        anchor = drawn if settings.objective == "behaviour" else old
    elif settings.objective != "behaviour":
        raise ConfigError(
            f"got no proximal log-probabilities; the {settings.objective} objective needs those of the trainer before "
            "the step's updates (a forward pass of its own)"
        )

    change = (current - anchor).detach().clamp(-LIMIT, LIMIT)
    ratio = _exponent(current - anchor, trained, settings.ratio).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    terms = -torch.minimum(ratio * advantage, clipped * advantage)
    if settings.dual_clip is not None:
        terms = torch.where(advantage < 0, torch.minimum(terms, -settings.dual_clip * advantage), terms)
    metrics = {
        "ratio": ratio,
        "clipped_low": (ratio < 1 - settings.clip_low) & (advantage < 0),
        "clipped_high": (ratio > 1 + settings.clip_high) & (advantage > 0),
        "approx_kl": torch.expm1(change) - change,
        "behaviour_gap": (current - drawn).abs(),
    }
    if settings.dual_clip is not None:
        metrics["dual_clipped"] = (ratio > settings.dual_clip) & (advantage < 0)
    if proximal is not None:
        metrics["proximal_gap"] = (old - drawn).abs()
    if settings.objective != "behaviour":
        weight = _exponent(old - drawn, trained, settings.ratio).exp()
        if settings.weight_cap is not None:
            metrics["weight_capped"] = weight > settings.weight_cap
            if settings.objective == "truncated":
                weight = weight.clamp(max=settings.weight_cap)
            else:
                weight = torch.where(weight > settings.weight_cap, 0.0, weight)
        metrics["weight"] = weight
        terms = terms * weight

    return _regularized(terms, current, trained, settings, reference, entropy, metrics), metrics


def _regularized(
    terms: Tensor,
    current: Tensor,
    trained: Tensor,
    settings: PolicyObjective,
    reference: Tensor | None,
    entropy: Tensor | None,
    metrics: dict[str, Any],
) -> Tensor:
    """The terms of tokens with the KL penalty and the entropy bonus, whose metrics are added."""
    if reference is not None:
        estimate = kl_estimate(
            current, _kept("the reference's log-probabilities", reference, trained), settings.kl_estimator
        )
        metrics["reference_kl"] = estimate
        if settings.kl:
            terms = terms + settings.kl * estimate
    elif settings.kl:
        raise ConfigError(
            f"got no log-probabilities of a reference; kl {settings.kl} needs them, or set kl to 0"
        )
    if entropy is not None:
        kept = _kept("entropies", entropy, trained)
        metrics["entropy"] = kept
        if settings.entropy:
            terms = terms - settings.entropy * kept
    elif settings.entropy:
        raise ConfigError(
            f"got no entropies of tokens; entropy {settings.entropy} needs them, or set entropy to 0"
        )
    return terms


def _exponent(difference: Tensor, trained: Tensor, ratio: Ratio) -> Tensor:
    """Logarithm of the ratio of each token, or of each sequence: [sequences, tokens] or [sequences, 1]."""
    if ratio != "token":
        difference = difference.sum(-1, keepdim=True)
        if ratio == "sequence_mean":
            difference = difference / trained.sum(-1, keepdim=True).clamp(min=1)
    return difference.clamp(-LIMIT, LIMIT)


def _kept(name: str, values: Tensor, trained: Tensor) -> Tensor:
    """As float, 0 where not trained: what padding holds must reach neither the loss nor, as 0 · NaN, the gradient."""
    require_shape(name, values, trained)
    return torch.where(trained, floats(values), 0.0)


# The critic's loss with clipped values (PPO).
#
# PPO with clipped values (openai/baselines, ppo2; InstructGPT, arXiv 2203.02155, appendix C), with V the value, V_old
# the one when the answer was scored, R the return:
#
#     L = ½ max((V − R)², (V_clip − R)²)        V_clip = min(max(V, V_old − clip), V_old + clip)
#
# summed over trained tokens and divided by the count of the step.


def value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    count: float | Tensor,
    clip: float | None = 0.2,
) -> LossSum:
    """A micro-batch's share of the critic's loss; all tensors are [sequences, tokens], `values` has the gradient.

    `count` is the number of trained tokens of the step (`loss_count` of `bnpo`). `clip` of None clips nothing. Metrics:
    `value_error` ((V − R)²), `value_clipped` (share of tokens whose clipped error is the larger).
    """
    if clip is not None and clip <= 0:
        raise ConfigError(f"got clip {clip} of values; need a number above 0, or None for no clip")
    trained = trained_tokens(mask)
    for name, tensor in (("values", values), ("old values", old_values), ("returns", returns)):
        require_shape(name, tensor, mask)
    value = torch.where(trained, floats(values), 0.0)
    old = torch.where(trained, floats(old_values.detach()), 0.0)
    target = torch.where(trained, floats(returns.detach()), 0.0)
    error = (value - target).square()
    largest, clipped = error, torch.zeros_like(trained)
    if clip is not None:
        bounded = (torch.minimum(torch.maximum(value, old - clip), old + clip) - target).square()
        largest, clipped = torch.maximum(error, bounded), bounded > error
    return LossSum(
        loss=divided(0.5 * largest.sum(), count),
        weight=trained.sum(),
        sums={"value_error": error.detach().sum(), "value_clipped": (clipped & trained).sum()},
    )
