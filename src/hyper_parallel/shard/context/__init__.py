"""Context parallelism: each sequence's positions split over an axis, and attention that sees them all.

`plan` decides, refuses, and says who holds which positions; `model_inputs` cuts what goes into the model and gathers
what comes out; `mask` reads what Transformers asks of a mask; `attention` swaps heads (Ulysses) and turns keys and
values (ring), and computes by the blocks of `block_attention`; `gather_positions` is for models that mix positions in
their own code.
"""

from hyper_parallel.shard.context.model_inputs import ContextRoot, apply_context, apply_context_to_root

__all__ = ["ContextRoot", "apply_context", "apply_context_to_root"]
