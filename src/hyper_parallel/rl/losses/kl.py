"""Estimators of the KL divergence from the policy π to a reference ρ, of tokens that the policy drew.

J. Schulman, "Approximating KL divergence" (2020), with d = log π − log ρ of a drawn token:

    k1 = d                 unbiased; as a loss its gradient has mean 0, so it serves in rewards alone
    k2 = d² / 2            biased, but its gradient is that of KL(π ‖ ρ) when π drew the token
    k3 = e^{−d} + d − 1    unbiased, never negative; GRPO's (arXiv 2402.03300, equation 4)
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.losses.reductions import floats, require_shape

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
