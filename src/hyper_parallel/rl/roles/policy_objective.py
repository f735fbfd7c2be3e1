"""The policy loss inside a model's forward pass: a `TokenObjective` of a micro-batch's rows.

The forward pass computes a chunk of positions at a time, and a part of the loss L may need all tokens of an answer
(`rl.ratio: answer`). Such a loss is differentiated first, at log-probabilities ℓ of a pass without gradients; the pass
with gradients then needs its own position only (`answer_objective`):

    Σ_t g_t (log p_t − sg(log p_t)) + L(ℓ)      g = ∂L/∂ℓ, sg: without a gradient
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hyper_parallel.config.rl import Ratio, RLTraining
from hyper_parallel.rl.losses import policy
from hyper_parallel.rl.losses.policy import PolicyObjective, policy_terms
from hyper_parallel.rl.losses.reductions import loss_count
from hyper_parallel.rl.sample import Sample

_RATIOS: dict[Ratio, policy.Ratio] = {
    "token": "token",
    "answer": "sequence_product",
    "answer_mean": "sequence_mean",
}


def settings_of(rl: RLTraining) -> PolicyObjective:
    """The objective that a run declares."""
    low, high = rl.clips
    return PolicyObjective(
        objective=rl.objective,
        ratio=_RATIOS[rl.ratios],
        clip_low=low,
        clip_high=high,
        weight_cap=rl.truncate if rl.objective == "truncated" else None,
        normalization=rl.normalized,
        kl=rl.kl,
    )


def count_of(rl: RLTraining, update: Sequence[Sample], batch: Sequence[Sample]) -> float:
    """What an update's sum over tokens is divided by (`losses.reductions`)."""
    kind = rl.normalized
    samples = batch if kind == "dapo" else update
    longest = max(len(one.tokens) for one in samples)
    mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, one in enumerate(samples):
        mask[row, : len(one.tokens)] = torch.tensor(one.drawn)
    return float(
        loss_count(
            kind,
            mask,
            max_length=rl.max_tokens if kind == "dr_grpo" else None,
            updates=rl.minibatches if kind == "dapo" else 1,
        )
    )


def weights_of(rl: RLTraining, drawn: Tensor, count: float) -> Tensor:
    """fp32 [B, S]: the weight of each token in the loss; 0 where the policy did not draw it."""
    weights = drawn.float()
    if rl.normalized == "grpo":
        weights = weights / drawn.sum(-1, keepdim=True).clamp(min=1)
    return weights / count if count else weights


@dataclass
class MetricSums:
    """Sums over tokens of an update's metrics, and the number of tokens."""

    tokens: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Tensor], logprobs: Tensor, trained: Tensor) -> None:
        """Of some positions."""
        self.tokens += float(trained.sum())
        for name, value in {**metrics, "entropy": -logprobs}.items():
            kept = torch.where(trained, value.detach().float(), 0.0)
            self.sums[name] = self.sums.get(name, 0.0) + float(kept.sum())

    def vector(self) -> Tensor:
        """fp64, to be added over ranks."""
        return torch.tensor([self.tokens, *self.sums.values()], dtype=torch.float64)

    def means(self, added: Tensor) -> dict[str, float]:
        """The mean of each metric over all ranks' tokens, from the added vectors."""
        tokens, *sums = added.tolist()
        return {name: value / max(tokens, 1.0) for name, value in zip(self.sums, sums, strict=True)}


@dataclass
class PolicyTokens:
    """Of the rows [B, S] of one micro-batch; a part of their positions where ratios are those of tokens."""

    settings: PolicyObjective
    temperature: float
    weights: Tensor
    behaviour: Tensor
    advantages: Tensor
    proximal: Tensor | None
    reference: Tensor | None
    sums: MetricSums
    """Is added to."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """As `TokenObjective` has them."""
        given = (self.weights, self.behaviour, self.advantages, self.proximal, self.reference)
        return tuple(one for one in given if one is not None)

    def __call__(self, logprobs_N: Tensor, *inputs_N: Tensor) -> Tensor:
        weights, behaviour, advantages, *others = inputs_N
        trained = weights > 0
        terms, metrics = policy_terms(
            logprobs_N,
            behaviour=behaviour,
            advantages=advantages,
            mask=trained,
            settings=self.settings,
            proximal=others.pop(0) if self.proximal is not None else None,
            reference=others.pop(0) if self.reference is not None else None,
        )
        self.sums.add(metrics, logprobs_N, trained)
        return (terms * weights).sum()


@dataclass(frozen=True)
class GivenGradient:
    """A loss of 0 with a gradient that is known for each position."""

    temperature: float
    gradient: Tensor
    """fp32 [B, S]."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """As `TokenObjective` has them."""
        return (self.gradient,)

    def __call__(self, logprobs_N: Tensor, *inputs_N: Tensor) -> Tensor:
        return (inputs_N[0] * (logprobs_N - logprobs_N.detach())).sum()


def answer_objective(tokens: PolicyTokens, logprobs: Tensor) -> tuple[GivenGradient, Tensor]:
    """(the objective of the pass with gradients, the zero-dim loss without one) of ratios of whole answers.

    `logprobs`: fp32 [B, S], of the labels under the weights that are trained, of whole rows.
    """
    leaf = logprobs.detach().requires_grad_()
    loss = tokens(leaf, *tokens.inputs)
    [gradient] = torch.autograd.grad(loss, [leaf])
    return GivenGradient(tokens.temperature, gradient), loss.detach()
