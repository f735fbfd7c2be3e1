"""The region check: every split region is run whole and split before training, and gradients are compared.

    right(strategy, model) ⇔ ∀ parameters p:  |∂L/∂p (split) − ∂L/∂p (whole)|∞  ≤  1e-5 · |∂L/∂p (whole)|∞

with float64 to decide where float32 differs by more. L is the loss on random tokens, or a random linear function of
the outputs, for random weights; both sides run in this process, the split one on simulated ranks
(`compat.local_tensor`). It costs seconds, so it runs on a reduced copy: the first layers up to the last *distinct* one,
at widths divided by a common factor with the same divisibility, on the fewest ranks for which the plan is the same. A
copy serves only if its plan does to each module what the plan of the real model does (`reduced.same_plan`).

What fails is refused with the module, the tensor, the error, and rules that were found to pass.
"""

from hyper_parallel.shard.region_check.check import (
    check_before_training,
    check_call,
    check_on_first_call,
    refusal_before_training,
)

__all__ = ["check_before_training", "check_call", "check_on_first_call", "refusal_before_training"]
