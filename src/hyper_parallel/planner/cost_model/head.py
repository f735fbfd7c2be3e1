"""The embedding, the head and the loss of a micro-batch.

    head = 3 · [T, h] · [h, V / P] in 16 bits + T V / P · 22 bytes + T h · 12 bytes        `head`

The vocabulary is split over the tensor axes (P ranks). A logit is written in 16 bits, read as 32, and its maximum,
exponential, sum and gradient go through memory five times in 32; the loss is rarely fused. The embedding's lookup and
its gradient's sums are T · h, moved.
"""

from __future__ import annotations

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.kernels import Products, moved
from hyper_parallel.planner.table import Array, Table

LOGIT_BYTES = 22.0


def head(t: Table, k: Constants) -> Array:
    """Seconds of a micro-batch, forward and backward."""
    tokens = t.micro * t.sequence / t.context
    columns = t.vocabulary / (t.tensor_x * t.tensor_y)
    products = 3 * Products(t, k, linear=False)(tokens, columns, t.hidden)
    return products + moved(t, k, tokens * (columns * LOGIT_BYTES + 12 * t.hidden))
