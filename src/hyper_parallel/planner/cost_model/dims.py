"""Derived dimensions of a model and a precision."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.table import PRECISIONS, Array, Table

_EIGHT = [PRECISIONS.index(name) for name in ("fp8", "mxfp8")]
_FOUR = [PRECISIONS.index(name) for name in ("nvfp4",)]


FORMAT_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes of an element of formats below 16 bits. `fp8` has one scale for a tensor; MXFP8 one of 8 bits for each 32
elements (OCP Microscaling Formats, 2023, section 5); NVFP4 one of 8 bits for each 16 (arXiv 2509.25149, section 2)."""

KEPT_BESIDE = {"mxfp8": 2 / 32, "nvfp4": 2 * (1 / 2 + 1 / 16)}
"""Bytes of a weight's copies for both directions of its product, beyond the 2 of a 16-bit weight: 8-bit primary weights
take its place, and what is more are MXFP8's scales; a 4-bit copy lies beside it (Transformer Engine has no 4-bit
primary weights)."""


def element_bytes(t: Table) -> Array:
    """Bytes of an activation's element."""
    return np.where(t.precision == PRECISIONS.index("fp32"), 4.0, 2.0)


def product_bytes(t: Table) -> Array:
    """Bytes that a product keeps of an element of its input, with its part of a block's scaling factor."""
    few = np.array([FORMAT_BYTES.get(name, 0.0) for name in PRECISIONS])[t.precision.astype(np.intp)]
    return np.where(few > 0, few, element_bytes(t))


def copy_bytes(t: Table) -> Array:
    """Bytes of a linear layer's weight that a format below 16 bits keeps beside its 2."""
    beside = np.array([KEPT_BESIDE.get(name, 0.0) for name in PRECISIONS])
    return beside[t.precision.astype(np.intp)]


def routed_share(t: Table) -> Array:
    """The share of the layers that have experts, 0 to 1."""
    return np.where(t.experts > 0, (t.mlp_layers - t.dense_layers) / t.layers, 0.0)


def dense_share(t: Table) -> Array:
    """The share of the layers that have an MLP without experts, 0 to 1."""
    return t.mlp_layers / t.layers - routed_share(t)


def expert_share(t: Table) -> Array:
    """Of the layers behind the dense ones, the share that has experts: 1 unless blocks have either mixer or MLP."""
    behind = np.maximum(t.layers - t.dense_layers, 1.0)
    return np.where(t.experts > 0, (t.mlp_layers - t.dense_layers) / behind, 1.0)


def attending(t: Table) -> Array:
    """The share of the layers that have softmax attention, 0 to 1."""
    return t.attention_layers / t.layers


def mixing(t: Table) -> Array:
    """The share of the layers that have another token mixer, 0 to 1."""
    return t.mixer_layers / t.layers


def blocks(t: Table) -> Array:
    """Blocks of a mean layer, each with a norm and a sum into the hidden state; 2 with attention and an MLP."""
    return (t.attention_layers + t.mixer_layers + t.mlp_layers) / t.layers


def expert_width(t: Table) -> Array:
    """Features of a token that routed experts take and give."""
    return np.where(t.expert_hidden > 0, t.expert_hidden, t.hidden)


def keys_seen(t: Table) -> Array:
    """Keys that a query sees: the mean over a causal sequence, and over layers with a window and without."""
    whole = t.sequence / 2
    window = np.minimum(t.window, t.sequence)
    near = window - window * window / (2 * t.sequence)
    return whole + t.windowed * (near - whole)


def in_eight_bits(t: Table) -> npt.NDArray[np.bool_]:
    """Where linear layers multiply in 8 bits."""
    return np.isin(t.precision, _EIGHT)


def in_four_bits(t: Table) -> npt.NDArray[np.bool_]:
    """Where linear layers multiply in 4 bits."""
    return np.isin(t.precision, _FOUR)
