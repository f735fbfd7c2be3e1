"""What frameworks do by default, as facts of their documentation; nothing here is fitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a framework does, beyond what its user spreads over which axes.

    Shares are 0 or 1 where documentation says that it is done or not.
    """

    name: str
    source: str
    """Where its facts stand."""
    fused: float = 1.0
    """Elementwise operators and norms are fused into few kernels."""
    flash: float = 1.0
    """Attention's scores stay on the chip (FlashAttention and its equals)."""
    overlap_data: float = 1.0
    """Gradients are reduced, and weights gathered, beside computation."""
    overlap_tensor: float = 0.0
    """The collectives of a layer's split products run beside them, in parts."""
    overlap_expert: float = 0.0
    """Tokens travel to experts and back beside the computation of others."""
    graphs: float = 0.0
    """Kernels are launched from recorded graphs."""
    balanced: float = 0.0
    """Pipeline stages are cut by cost, the head's included, and not by a number of layers."""
    dedup: float = 0.0
    """A token that goes to several experts of a node crosses the network once."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient's element, as it is summed over micro-batches and ranks."""
    weight_bytes: float = 2.0
    """Bytes of a parameter as ranks keep it between steps, a float32 master in the optimizer's state not counted."""
    state_bytes: float = 12.0
    """Bytes of a parameter's optimizer state, a float32 master included: AdamW's two moments and a master are 12."""


GENERIC = Profile(name="generic", source="what frameworks have in common")
