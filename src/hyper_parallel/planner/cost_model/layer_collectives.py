"""Communication time of a layer's forward and backward pass: tensor axes, context, and the dispatch of tokens to
experts.

**Tensor axes.** One axis: with the sequence split, a gather before and a reduce-scatter after each of the two blocks,
without it one all-reduce after each (Korthikanti et al., arXiv 2205.05198, section 4.2.2): of T · h · 2 bytes, the same
time; in float32 an element has 4, here and below. Two axes: the table of docs/tensor2d.md (after Wang et al.,
Tesseract, arXiv 2105.14500, and AxoNN, 2305.13525), whose U is T · h / (x · y) elements:

    over y   (2 (y − 1)) U                 attention's input and output
             (y − 1) U + (y − 1) U         the MLP's
    over x   ((x − 1) ((H + 2 K) d + H d) / h) U + ((x − 1) (2 e + e) / h) U

**Context.** A ring passes keys and values round and hides behind the attention that they are for; Ulysses exchanges
heads for positions (docs/context.md has both counts).

Frameworks that run a collective beside the products that it serves hide a part of it (`hidden_tensor`,
`hidden_expert`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.cluster.collective_cost import destinations, reached
from hyper_parallel.planner.columns import CONTEXT_METHODS, SCHEDULES
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import attending, blocks, element_bytes, expert_width, mixing
from hyper_parallel.planner.cost_model.operators import Ranks
from hyper_parallel.planner.cost_model.pipeline import in_pairs
from hyper_parallel.planner.table import Array, Table

RING = CONTEXT_METHODS.index("ring")
PAIRS_HIDE = 0.87
"""Of the collectives of tensor axes, what micro-batches in pairs hide: 81% to 98% of six simulated steps, the least
with two axes."""


@dataclass(frozen=True)
class Exchanged:
    """Seconds that are not hidden, of a layer's pass."""

    tensor: Array
    """In each pass."""
    beside: Array
    """Of the tensor axes, what goes beside another micro-batch in each pass: hidden, but it slows that."""
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
) -> Exchanged:
    """What the collectives of a layer add, beside `attention` seconds of attention and `compute` of all arithmetic,
    forward."""
    tensor = _tensor(t, ranks, tokens, with_experts) * (1 - k.hidden_tensor * t.overlap_tensor)
    beside: Array = np.zeros(1)
    if np.any(t.ordered * t.tensor_x * t.tensor_y > 1):
        beside = np.minimum(PAIRS_HIDE * paired(t, k) * tensor, compute)
        tensor = tensor - beside
    expert: Array = np.zeros(1)
    if np.any(t.expert * t.expert_tensor > 1):
        expert = exchanged_experts(t, k, ranks, tokens, compute) * with_experts
    forward: Array = np.zeros(1)
    backward = forward
    if np.any(t.context > 1):
        forward, backward = _context(t, ranks, tokens, attention)
    return Exchanged(tensor, beside, expert, forward, backward)


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


# Seconds of dispatching tokens to experts and combining their results, each pass of a layer.
#
# **Copies of a token.** A token goes to c of E experts, which lie evenly on R = d · k ranks: d in each domain of fast
# links (a node, or a supernode such as an NVL72 rack), k domains on the network. With expert groups (DeepSeek-V2, arXiv
# 2405.04434, section 2.2.2) its experts lie in g of G groups, so that it reaches r domains instead of k (`reached`):
#
#     r = k (1 − Π_{i<g} (1 − (G / k) / (G − i)))   where a domain has several groups, k g / G where a group has several
#     nodes(c) = r (1 − (1 − 1/r)^c)                domains that get a token                              `destinations`
#     ranks(c) = r d (1 − (1 − 1/(r d))^c)          ranks that get a token
#
# A domain is reached with equal probability, so that 1/k of what a token sends stays in its own. Copies of a token are
#
#     | | over the network | over the links of a domain |
#     |---|---|---|
#     | a row for each expert (an all-to-all) | c (1 − 1/k) | c (d − 1) / R |
#     | one row to each domain, forwarded there (DeepEP, HybridEP) | nodes (1 − 1/k) | ranks (1 − 1/d) |
#
# The second never exceeds the first on the network (nodes ≤ c), and both send nothing over it where k is 1.
#
# **Time.** Each rank sends T / P tokens of h elements. The links of a domain and the network work at once, so that the
# slower of the two decides, and the fullest rank's load u in place of the mean where routing is not forced to be even:
#
#     one way(b) = u T / P · h · b · max(network copies / rate, domain copies / rate) + latency            `_one_way`
#
# b are bytes of an element: dispatch may be in 8 bits with a scale for each 128 (DeepSeek-V3, arXiv 2412.19437, section
# 3.3.3), combine is in 16. Either way a pass has one of each. Rows go to all domains at once and take turns on no link,
# so that the network is not crowded as by rings; libraries made for it reach `dispatch` of its rate (DeepEP's README:
# 43 to 45 GB/s of 50), all-to-alls `scattered`. Where ranks of `expert_tensor` split an expert's features, rows are
# gathered over them before it and reduce-scattered behind it.
#
# **Overlap.** Of a layer's exchanges, both passes together, another micro-batch hides `hidden_expert` where a framework
# does so (Megatron's combined 1F1B), everything in DualPipe (2412.19437, section 3.2.1) and where micro-batches run in
# pairs (`paired`), and never more than there is to compute. The rest is exposed.

DUALPIPE = SCHEDULES.index("dualpipe")


def load(t: Table, k: Constants) -> Array:
    """Tokens of the fullest rank to the mean; 1 where routing is forced to be even."""
    return k.imbalance ** (1 - t.even)


def copies(t: Table, ranks: Ranks) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Rows of a token over the network and inside a domain: one for each expert, and one for each domain."""
    group = ranks.experts
    inside, domains = group.node * group.supernode, group.network
    chosen = np.maximum(t.chosen, 1.0)
    plain = chosen * (1 - 1 / domains), chosen * (inside - 1) / group.ranks
    within = reached(t.expert_groups, t.chosen_groups, domains)
    to_domains, to_ranks = destinations(within, chosen), destinations(within * inside, chosen)
    return plain, (to_domains * (1 - 1 / domains), to_ranks * (1 - 1 / inside))


def paired(t: Table, k: Constants) -> Array:
    """1 where exchanges are ordered beside the other micro-batch of a pair. Nowhere on machines on which collectives
    and products take turns."""
    return np.where(in_pairs(t), float(k.beside < 1.0), 0.0)


def exchanged_experts(t: Table, k: Constants, ranks: Ranks, tokens: Array, compute: Array) -> Array:
    """Seconds of a routed layer's exchanges in each pass that nothing hides; mean of both passes.

    `compute`: seconds of a routed layer's arithmetic forward. The backward pass takes twice as long.
    """
    seconds = experts_sent(t, k, ranks, tokens)
    share = np.where(t.schedule == DUALPIPE, 1.0, k.hidden_expert * t.overlap_expert)
    if np.any(t.ordered > 0):
        share = np.maximum(share, paired(t, k))
    # Both passes have three times the forward pass' arithmetic between them, half of it for each exchange's mean.
    behind = np.minimum(share * seconds, 1.5 * compute)
    return np.where(t.expert * t.expert_tensor > 1, seconds - behind, 0.0)


def experts_sent(t: Table, k: Constants, ranks: Ranks, tokens: Array) -> Array:
    """Seconds of a routed layer's exchanges in each pass, hidden or not, where experts are spread."""
    size = element_bytes(t)
    narrow = np.where(t.dispatch_bytes < 2, t.dispatch_bytes, size)
    each = load(t, k) * tokens / ranks.tensor * expert_width(t)
    seconds = _one_way(t, k, ranks, each * narrow) + _one_way(t, k, ranks, each * size)
    if np.any(t.expert_tensor > 1):
        rows = each * t.chosen * t.expert_tensor
        gathers = ranks.expert_tensor.gather(rows * narrow) + ranks.expert_tensor.gather(rows * size)
        seconds = seconds + np.where(t.expert_tensor > 1, gathers, 0.0)
    return seconds


def _one_way(t: Table, k: Constants, ranks: Ranks, bytes: Array) -> Array:
    """Seconds in which each rank sends tokens of `bytes` together to their experts' ranks, or back."""
    group = ranks.experts
    inside = group.node * group.supernode
    # Of what goes to other ranks of a domain, a part stays in the node.
    others = np.maximum(inside - 1, 1.0)
    link = (
        (group.node - 1) / group.node_rate + (group.supernode - 1) * group.node / group.supernode_rate
    ) / others
    plain, once = copies(t, ranks)
    seconds = np.maximum(plain[0] / (t.network_rate * k.scattered), plain[1] * link)
    if np.any(t.dedup > 0):
        seconds_once = np.maximum(once[0] / (t.network_rate * k.dispatch), once[1] * link)
        seconds = (1 - t.dedup) * seconds + t.dedup * seconds_once
    return bytes * seconds + group.latency
