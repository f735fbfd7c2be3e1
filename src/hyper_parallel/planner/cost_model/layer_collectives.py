"""Communication time of a layer's forward and backward pass.

**Tensor axes.** One axis: with the sequence split, a gather before and a reduce-scatter after each of the two blocks,
without it one all-reduce after each (Korthikanti et al., arXiv 2205.05198, section 4.2.2): of T · h · 2 bytes, the same
time; in float32 an element has 4, here and below. Two axes: the table of docs/tensor2d.md (after Wang et al.,
Tesseract, arXiv 2105.14500, and AxoNN, 2305.13525),
whose U is T · h / (x · y) elements:

    over y   (2 (y − 1)) U                 attention's input and output
             (y − 1) U + (y − 1) U         the MLP's
    over x   ((x − 1) ((H + 2 K) d + H d) / h) U + ((x − 1) (2 e + e) / h) U

**Experts.** Each token goes to `chosen` experts and back: two exchanges of T · chosen · h · 2 bytes over the expert
axis in each pass. Where copies for experts of one node are sent once (DeepEP), a token crosses the network to each of
the k nodes with probability 1 − (1 − 1/k)^chosen.

**Context.** A ring passes keys and values round and hides behind the attention that they are for; Ulysses exchanges
heads for positions (docs/context.md has both counts).

Frameworks that run a collective beside the products that it serves hide a part of it (`hidden_tensor`,
`hidden_expert`). DualPipe hides all of an exchange behind another micro-batch (arXiv 2412.19437, section 3.2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.planner.codes import CONTEXT_METHODS, SCHEDULES
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import attending, blocks, element_bytes, expert_width, mixing
from hyper_parallel.planner.cost_model.rank_groups import Ranks
from hyper_parallel.planner.table import Array, Table

RING = CONTEXT_METHODS.index("ring")
DUALPIPE = SCHEDULES.index("dualpipe")


@dataclass(frozen=True)
class Exchanged:
    """Seconds that are not hidden, of a layer's pass."""

    tensor: Array
    """In each pass."""
    expert: Array
    """In each pass."""
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
    t: Table, k: Constants, ranks: Ranks, tokens: Array, with_experts: Array, attention: Array
) -> Exchanged:
    """What the collectives of a layer add, beside `attention` seconds of attention."""
    tensor = _tensor(t, ranks, tokens, with_experts) * (1 - k.hidden_tensor * t.overlap_tensor)
    expert: Array = np.zeros(1)
    if np.any(t.expert > 1):
        hidden = np.where(t.schedule == DUALPIPE, 1.0, k.hidden_expert * t.overlap_expert)
        expert = _expert(t, ranks, tokens) * with_experts * (1 - hidden)
    forward: Array = np.zeros(1)
    backward = forward
    if np.any(t.context > 1):
        forward, backward = _context(t, ranks, tokens, attention)
    return Exchanged(tensor, expert, forward, backward)


def _tensor(t: Table, ranks: Ranks, tokens: Array, with_experts: Array) -> Array:
    whole = element_bytes(t) * tokens * t.hidden
    # With experts of their own ranks a layer has one block under the tensor axes, not two.
    under = blocks(t) - with_experts * np.where(t.expert > 1, 1.0, 0.0)
    one_axis = under * ranks.x.reduce(whole)
    if not np.any(t.tensor_y > 1):
        return np.where(t.tensor_x > 1, one_axis, 0.0)
    x, y = t.tensor_x, t.tensor_y
    attended = t.heads * t.head_dim
    over_y = 4 * ranks.y.gather(whole / x)
    features = (2 * attended + 2 * t.kv_heads * t.head_dim + 3 * t.ffn) / t.hidden
    over_x = np.where(x > 1, ranks.x.gather(whole / y * features / 4) * 4, 0.0)
    return np.where(y > 1, over_y + over_x, np.where(x > 1, one_axis, 0.0))


def _expert(t: Table, ranks: Ranks, tokens: Array) -> Array:
    group = ranks.experts
    bytes = element_bytes(t) * tokens * t.chosen * expert_width(t) / ranks.tensor
    nodes = np.maximum(group.network, 1.0)
    needed = nodes * (1 - (1 - 1 / nodes) ** t.chosen) / np.maximum(t.chosen, 1.0)
    copies = np.where(t.dedup > 0, np.minimum(needed, 1.0), 1.0)
    return np.where(t.expert > 1, 2 * group.exchange(bytes, copies), 0.0)


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
