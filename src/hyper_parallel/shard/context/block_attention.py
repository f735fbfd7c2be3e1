"""Attention of one key block with log-sum-exp, and the merge of two blocks.

For scores s = scale · q kᵀ (soft-capped: c · tanh(s / c)) over the keys that a query sees:

    lse = log Σ exp(s),   out = Σ exp(s − lse) v                                        `attend`
    lse = log(exp(lse₁) + exp(lse₂)),   out = Σᵢ exp(lseᵢ − lse) outᵢ                   `shares`

(FlashAttention, arXiv 2205.14135, section 3.1). From the *whole* lse and out, a block's part of the gradients follows
by itself: P = exp(s − lse), dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)), dQ = scale · dS K, dK = scale · dSᵀ Q
(ibid., appendix B.2; Ring Attention, arXiv 2310.01889). Sums are taken in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.compat.attention import Gradients, Kernel, kernel_for


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over blocks are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, Dv], lse [B, H, S] in the accumulation dtype) of queries [B, H, S, D], a block of keys
    [B, K, T, D] and values [B, K, T, Dv]; K divides H.

    `mask` is bool [B or 1, 1, S, T], True where seen. `causal` is for S = T. Where nothing is seen out is 0 and lse
    −inf.
    """
    kernel = _kernel(q, v, mask, softcap)
    if kernel is not None:
        out, lse = kernel.forward(q, k, v, mask, causal, scale)
        return out, lse.to(accumulation(q.dtype))
    scores, _ = _scores(q, k, mask, causal, scale, softcap)
    lse = scores.logsumexp(-1)
    weights = (scores - unseen_last(lse).unsqueeze(-1)).exp()
    out = _by_head(weights @ v.to(weights.dtype), q)
    return out.to(v.dtype), _by_head(lse, q)


def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Gradients:
    """A block's part of the gradients of q, k and v, given `out` and `lse` of all blocks together."""
    lse = unseen_last(lse)
    kernel = _kernel(q, v, mask, softcap)
    if kernel is not None:
        return kernel.backward(gradient, q, k, v, out, lse, mask, causal, scale)
    scores, bent = _scores(q, k, mask, causal, scale, softcap)
    weights = (scores - _by_group(lse, k).unsqueeze(-1)).exp()
    given, theirs = (_by_group(x.to(scores.dtype), k) for x in (gradient, out))
    dv = weights.transpose(-1, -2) @ given
    delta = (given * theirs).sum(-1, keepdim=True)
    ds = weights * (given @ v.to(scores.dtype).transpose(-1, -2) - delta) * scale
    if bent is not None:
        ds = ds * (1 - bent.square())
    dq = _by_head(ds @ k.to(scores.dtype), q)
    dk = ds.transpose(-1, -2) @ _by_group(q.to(scores.dtype), k)
    return dq, dk, dv


def shares(lse: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lse of two sets of keys together, the share exp(lseᵢ − lse) of each). Either may have seen nothing."""
    both = torch.logaddexp(lse, more_lse)
    safe = unseen_last(both)
    return both, (lse - safe).exp(), (more_lse - safe).exp()


def unseen_last(lse: Tensor) -> Tensor:
    """The log-sum-exp with +inf where nothing is seen, so that exp(s − lse) is 0 there and no NaN."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _kernel(q: Tensor, v: Tensor, mask: Tensor | None, softcap: float | None) -> Kernel | None:
    return kernel_for(q, v, masked=mask is not None) if softcap is None else None


# Plain arithmetic: the query heads that share a key-value head are rows of one matrix, [B, K, H/K · S, D].


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    return x.reshape(x.size(0), k.size(1), -1, *x.shape[3:])


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    return x.reshape(*q.shape[:3], *x.shape[3:])


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, K, H/K · S, T], −inf where not seen; and tanh(s / c) where they are soft-capped."""
    dtype, bent = accumulation(q.dtype), None
    scores = _by_group(q.to(dtype), k) @ k.to(dtype).transpose(-1, -2) * scale
    if softcap is not None:
        bent = (scores / softcap).tanh()
        scores = bent * softcap
    if causal:
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()[None, None]
    if mask is not None:
        groups = q.size(1) // k.size(1)
        hidden = ~mask.expand(-1, groups, -1, -1).flatten(1, 2).unsqueeze(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, bent
