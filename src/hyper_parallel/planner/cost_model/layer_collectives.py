"""Communication time of a layer's forward and backward pass.

**Tensor axes.** One axis: with the sequence split, a gather before and a reduce-scatter after each of the two blocks,
without it one all-reduce after each (Korthikanti et al., arXiv 2205.05198, section 4.2.2): of T · h · 2 bytes, the same
time; in float32 an element has 4, here and below. Two axes: the table of docs/tensor2d.md (after Wang et al.,
Tesseract, arXiv 2105.14500, and AxoNN, 2305.13525),
whose U is T · h / (x · y) elements:

    over y   (2 (y − 1)) U                 attention's input and output
             (y − 1) U + (y − 1) U         the MLP's
    over x   ((x − 1) ((H + 2 K) d + H d) / h) U + ((x − 1) (2 e + e) / h) U

**Experts.** Dispatch and combine are a model of their own (`dispatch`).

**Context.** A ring passes keys and values round and hides behind the attention that they are for; Ulysses exchanges
heads for positions (docs/context.md has both counts).

Frameworks that run a collective beside the products that it serves hide a part of it (`hidden_tensor`,
`hidden_expert`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.planner.codes import CONTEXT_METHODS
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import attending, blocks, element_bytes, mixing
from hyper_parallel.planner.cost_model.dispatch import exchanged_experts
from hyper_parallel.planner.cost_model.rank_groups import Ranks
from hyper_parallel.planner.table import Array, Table

RING = CONTEXT_METHODS.index("ring")


@dataclass(frozen=True)
class Exchanged:
    """Seconds that are not hidden, of a layer's pass."""

    tensor: Array
    """In each pass."""
    expert: Array
    """In each pass, the mean of both."""
    context_forward: Array
    context_backward: Array

    @property
    def forward(self) -> Array:
        """All of the forward pass."""
        return self.tensor + self.expert + self.context_forward

    @property
    def backward(self) -> Array:
        """All of the backward pass."""
        return self.tensor + self.expert + self.context_backward


def exchanged(
    t: Table,
    k: Constants,
    ranks: Ranks,
    tokens: Array,
    with_experts: Array,
    attention: Array,
    compute: Array,
    shared: Array,
) -> Exchanged:
    """What the collectives of a layer add, beside `attention` seconds of attention, `compute` of all arithmetic and
    `shared` of shared experts, forward."""
    tensor = _tensor(t, ranks, tokens, with_experts) * (1 - k.hidden_tensor * t.overlap_tensor)
    expert: Array = np.zeros(1)
    if np.any(t.expert * t.expert_tensor > 1):
        expert = exchanged_experts(t, k, ranks, tokens, compute, shared) * with_experts
    forward: Array = np.zeros(1)
    backward = forward
    if np.any(t.context > 1):
        forward, backward = _context(t, ranks, tokens, attention)
    return Exchanged(tensor, expert, forward, backward)


def _tensor(t: Table, ranks: Ranks, tokens: Array, with_experts: Array) -> Array:
    whole = element_bytes(t) * tokens * t.hidden
    # With experts of their own ranks a layer has one block under the tensor axes, not two.
    under = blocks(t) - with_experts * np.where(ranks.of_experts > 1, 1.0, 0.0)
    one_axis = under * ranks.x.reduce(whole)
    if not np.any(t.tensor_y > 1):
        return np.where(t.tensor_x > 1, one_axis, 0.0)
    x, y = t.tensor_x, t.tensor_y
    attended = t.heads * t.head_dim
    over_y = 4 * ranks.y.gather(whole / x)
    features = (2 * attended + 2 * t.kv_heads * t.head_dim + 3 * t.ffn) / t.hidden
    over_x = np.where(x > 1, ranks.x.gather(whole / y * features / 4) * 4, 0.0)
    return np.where(y > 1, over_y + over_x, np.where(x > 1, one_axis, 0.0))


def _context(t: Table, ranks: Ranks, tokens: Array, attention: Array) -> tuple[Array, Array]:
    n = t.context
    heads, keys = t.heads / ranks.tensor, np.maximum(t.kv_heads / ranks.tensor, 1.0)
    width = np.where(t.key_rank > 0, (t.plain + t.rotary + t.value) / 2, t.head_dim)
    size = element_bytes(t)
    step = attending(t) * ranks.context.send(2 * size * tokens * keys * width)
    ring = np.maximum((n - 1) * step - attention, 0.0)
    ring_back = np.maximum(2 * (n - 1) * step - 2.5 * attention, 0.0)
    swap = attending(t) * 2 * ranks.context.exchange(size * tokens * (heads + keys) * width)
    if np.any(t.mixer_layers > 0):
        # Columns of the projection go to where all positions of a head are, and the result comes back.
        columns = (t.mixer_inputs + t.mixer_inner) / ranks.tensor
        swap = swap + mixing(t) * 2 * ranks.context.exchange(size * tokens * columns)
    is_ring = t.method == RING
    forward = np.where(is_ring, ring, swap)
    backward = np.where(is_ring, ring_back, swap)
    return np.where(n > 1, forward, 0.0), np.where(n > 1, backward, 0.0)
