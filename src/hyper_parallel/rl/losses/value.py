"""The critic's loss with clipped values, and the share of the returns' variance that values explain (PPO).

PPO with clipped values (openai/baselines, ppo2; InstructGPT, arXiv 2203.02155, appendix C), with V the value, V_old the
one when the answer was scored, R the return:

    L = ½ max((V − R)², (V_clip − R)²)        V_clip = min(max(V, V_old − clip), V_old + clip)

summed over trained tokens and divided by the count of the step. Explained variance: 1 − Var(R − V) / Var(R).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.losses.reductions import LossSum, divided, floats, require_shape, trained_tokens


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


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(R − V) / Var(R) over the trained tokens: 1 is perfect, 0 no better than a constant; NaN if R is constant.

    Returns a float64 scalar without a gradient.
    """
    trained = trained_tokens(mask)
    target = returns.detach()[trained].double()
    error = target - values.detach()[trained].double()
    variance = target.var(correction=0)
    return torch.where(variance > 0, 1 - error.var(correction=0) / variance, torch.nan)
