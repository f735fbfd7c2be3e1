"""Context parallelism: each sequence's positions split over an axis, and attention that sees them all.

`plan` decides and refuses; `position_split` says who holds which positions; `model_inputs` cuts what goes into the
model and gathers what comes out; `mask` reads what Transformers asks of a mask; `attention` swaps heads (Ulysses) and
turns to `ring_attention`, which goes by `block_schedule` and computes with `block_attention`.
"""

from hyper_parallel.shard.context.model_inputs import ContextRoot, apply_context, apply_context_to_root
from hyper_parallel.shard.context.plan import ContextPlan, PositionSplit, plan_context, with_context_folds

__all__ = [
    "ContextPlan",
    "ContextRoot",
    "PositionSplit",
    "apply_context",
    "apply_context_to_root",
    "plan_context",
    "with_context_folds",
]
