"""Experts of a layer that the tokens of a pass choose: which weights a pass reads.

    touched = Σ_experts 1 − (1 − k p_i)^T          experts that at least one of T tokens chooses   `distinct_experts`

p_i is an expert's share of all choices: 1/E where routing is balanced, else i^−s normalized (Zipf), so that a skew s of
0 is balanced; k p_i is at most 1.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def distinct_experts(experts: int, chosen: int, tokens: float, skew: float = 0.0, first: int = 0) -> float:
    """Experts, from the `first` most popular on, that `tokens` tokens choose at least once, in expectation.

    >>> round(distinct_experts(256, 8, 32), 1)
    163.3
    """
    if skew == 0:
        return float((experts - first) * (1 - (1 - chosen / experts) ** tokens))
    return float(sum(1 - (1 - share) ** tokens for share in expert_shares(experts, chosen, skew)[first:]))


def expert_shares(experts: int, chosen: int, skew: float) -> tuple[float, ...]:
    """Probability that a token chooses each expert, the most popular first; they add up to `chosen`.

    An expert is chosen by a token at most once: what would go beyond is spread over the others.
    """
    weights = [rank**-skew for rank in range(1, experts + 1)]
    found: list[float] = []
    left, total = float(chosen), sum(weights)
    for weight in weights:
        share = min(1.0, left * weight / total)
        found.append(share)
        left, total = left - share, total - weight
    return tuple(found)
