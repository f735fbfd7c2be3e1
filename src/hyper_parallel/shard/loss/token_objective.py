"""Objectives that are a sum over tokens of a function of each token's log-probability: those of reinforcement learning.

    loss = Σ_t f(log p_t, inputs_t)

Since each token's part needs its own position only, the loss is computed a chunk of positions at a time, like the
cross-entropy.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TokenObjective(Protocol):
    """What takes the place of the cross-entropy in a forward pass."""

    @property
    def temperature(self) -> float:
        """Logits are divided by it."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """[B, S] each, aligned with the labels, of whole rows."""

    def __call__(self, logprobs_N: Tensor, *inputs_N: Tensor) -> Tensor:
        """The loss of these positions, zero-dim, from the fp32 log-probabilities of their labels; those of labels that
        are -100 are 0."""
