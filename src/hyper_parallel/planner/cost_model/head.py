"""The embedding, the head and the loss of a micro-batch, and modules that predict one token more.

    head = 3 · [T, h] · [h, V / P] in 16 bits + T V / P · 22 bytes + T h · 12 bytes        `head`

The vocabulary is split over the tensor axes (P ranks). A logit is written in 16 bits, read as 32, and its maximum,
exponential, sum and gradient go through memory five times in 32; the loss is rarely fused. The embedding's lookup and
its gradient's sums are T · h, moved. A frozen head has no gradient of its weight: two products.

    module = layer · (its matrices / a mean's) + 3 · [T, 2 h] · [2 h, h] + head     `prediction_modules`

A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) has a layer of its own, a projection of
the last hidden state beside the next token's embedding, and the model's head again; it runs on the last stage.
"""

from __future__ import annotations

import numpy as np

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.kernels import Products, moved
from hyper_parallel.planner.cost_model.parameters import layer_matrices, module_matrices
from hyper_parallel.planner.table import Array, Table

LOGIT_BYTES = 22.0


def head(t: Table, k: Constants) -> Array:
    """Seconds of a micro-batch, forward and backward."""
    tokens = t.micro * t.sequence / t.context
    columns = t.vocabulary / (t.tensor_x * t.tensor_y)
    products = (3 - t.frozen) * Products(t, k, linear=False)(tokens, columns, t.hidden)
    return products + moved(t, k, tokens * (columns * LOGIT_BYTES + 12 * t.hidden))


def prediction_modules(t: Table, k: Constants, layer: Array) -> Array:
    """Seconds of a micro-batch's modules, forward and backward; `layer`: of a layer's passes."""
    if not np.any(t.prediction_modules > 0):
        return np.zeros(1)
    tokens = t.micro * t.sequence / t.context
    projection = 3 * Products(t, k)(tokens, t.hidden / (t.tensor_x * t.tensor_y), 2 * t.hidden)
    # Where layers are blocks of either a mixer or an MLP, a module is not as a mean one of them.
    layer = layer * module_matrices(t) / layer_matrices(t)
    return t.prediction_modules * (layer + projection + head(t, k))
