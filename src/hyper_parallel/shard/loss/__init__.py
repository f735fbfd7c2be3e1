"""The loss: cross-entropy over a split vocabulary, computed a chunk of positions at a time.

`causal_lm_loss` is what a training loop calls; `cross_entropy_sum` is the kernel for logits at hand.
"""

from hyper_parallel.shard.forward import logits_of
from hyper_parallel.shard.loss.causal_lm import apply_loss, causal_lm_loss, token_logprobs, token_loss
from hyper_parallel.shard.loss.cross_entropy import IGNORED, TokenObjective, cross_entropy_sum, valid_tokens

__all__ = [
    "IGNORED",
    "TokenObjective",
    "apply_loss",
    "causal_lm_loss",
    "cross_entropy_sum",
    "logits_of",
    "token_logprobs",
    "token_loss",
    "valid_tokens",
]
