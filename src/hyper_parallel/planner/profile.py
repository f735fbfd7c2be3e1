"""Framework facts: what each does by default, from its documentation, as columns of the table and defaults of options.

A `Profile` has two sorts of facts. Those of `Profile` itself say how a step runs whatever its user asks for, and are
columns of the table. Its `Defaults` say what an option is that the user has not written, and what a word of theirs
means; rows of published runs are filled with them, and the output names each. `framework_profiles` has the profiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hyper_parallel.workload.workload import Precision


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Options as they are where nobody has set them."""

    zero: int = 0
    """0 to 3, over the ranks that see different data."""
    sequence_parallel: bool = False
    """Where tensor parallelism is used."""
    recompute: Literal["none", "selective", "full"] = "none"
    precision: Precision = "bf16"
    schedule: Literal["1f1b", "interleaved", "dualpipe"] = "1f1b"
    """Of pipelines."""
    vocabulary: int = 50257
    """Tokens; 50257 is GPT-2's, which Megatron and what follows it are shipped with."""
    selective: float = 0.0
    """What the word "selective" means of recomputation. 0: the scores of attention, as in Megatron. Else a share of the
    layers, whole, or as much of each."""
    expert_tensor: Literal["whole", "tensor"] = "whole"
    """Experts that are spread: each whole, or its features split over the tensor axes."""
    gathered_in_pipelines: bool = False
    """With a pipeline weights that are split for good stay gathered, and gradients whole, from a step's first
    micro-batch to its last."""


UNKNOWN = ("overlap_expert", "graphs", "fused_routing", "dedup", "even")
"""Facts of a mixture's step that a run's source may leave open; each is the faster at 1."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a framework does, beyond what its user spreads over which axes.

    Shares are 0 or 1 where documentation says that something is not done, or done. 0.5 in a column of UNKNOWN says that
    a framework does either, as its user asks: the interval of an estimate then holds both (`error_interval`).
    """

    name: str
    source: str
    """Where its facts stand."""
    fused: float = 1.0
    """Elementwise operators and norms are fused into few kernels. 0.5: those that move most bytes (norms, softmax, a
    bias with its activation or dropout), in about as many kernels, and products do not add into sums of gradients."""
    flash: float = 1.0
    """Attention's scores stay on the chip: 1 by the best kernels that a device has; a share of their rate by others; 2
    by FlashAttention-2, PyTorch's copy or its own package, which knows no instruction that is newer than Ampere."""
    overlap_data: float = 1.0
    """Gradients are reduced, and weights gathered, beside computation."""
    overlap_split: float = 1.0
    """What is left of that for gradients where the optimizer's state is split (ZeRO)."""
    overlap_tensor: float = 0.0
    """The collectives of a layer's split products run beside them, in parts."""
    overlap_expert: float = 0.0
    """Tokens travel to experts and back beside the computation of another micro-batch."""
    overlap_shared: float = 0.0
    """They travel beside shared experts."""
    ordered: float = 0.0
    """Collectives are in the order that `hyper_parallel.overlap` searches: without a pipeline, and with an even number
    of micro-batches, tokens travel to experts and back beside the other micro-batch of a pair, and take turns with
    gathered weights on the links that both use. Links have the rates that a cluster states (`simulated_links`)."""
    graphs: float = 0.0
    """Kernels are launched from recorded graphs."""
    fused_routing: float = 0.0
    """A routed layer's top-k, probabilities and permutations are few kernels (Megatron's --moe-router-fusion and
    --moe-permute-fusion)."""
    bias_by_expert: float = 0.0
    """Biases of routed experts are added to their results expert by expert, times a token's probability, in float32
    (`TEGroupedMLP._apply_bias` of Megatron Core, and its copy in NeMo AutoModel)."""
    balanced: float = 0.0
    """Pipeline stages are cut by cost, the head's included, and not by a number of layers."""
    greedy: float = 0.0
    """That cut fills a stage until it exceeds its share of the cost; where the last are never reached, a run fails."""
    dedup: float = 0.0
    """A token that goes to several experts of a node crosses the network once."""
    dispatch_bytes: float = 2.0
    """Bytes of an element on its way to experts, scales included, where it is sent in 8 bits; else the activations'."""
    even: float = 0.0
    """Routing is forced to be even, as benchmarks do."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient's element, as it is summed over micro-batches and ranks."""
    scatter_bytes: float = 2.0
    """The same where parameters are split for good (ZeRO-3) and gradients are scattered layer by layer; at least the
    bytes that a weight is computed in."""
    weight_bytes: float = 2.0
    """Bytes of a parameter as ranks keep it between steps, a float32 master in the optimizer's state not counted."""
    state_bytes: float = 12.0
    """Bytes of a parameter's optimizer state, a float32 master included: AdamW's two moments and a master are 12."""
    logit_bytes: float = 8.0
    """Bytes of a logit while the loss goes back: in 16 bits and in float32, the float32 gradient in its copy's place,
    and the gradient in 16 bits. A loss that keeps a float32 copy more takes 12, one within the 16-bit logits 4."""
    regathers: float = 1.0
    """A product whose input is split by tokens keeps its part, and gathers it again for its gradient; a half says that
    it is not known."""
    tuned: float = 0.0
    """Kernels of products are chosen for Hopper by Transformer Engine or XLA, not as PyTorch's library offers them; a
    half says that it is not known."""
    scans: float = 1.0
    """Token mixers such as Mamba run in kernels that keep a chunk's products on the chip; 0: reference code, which
    writes each intermediate."""
    defaults: Defaults = field(default_factory=Defaults)
