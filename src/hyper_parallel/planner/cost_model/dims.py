"""Derived dimensions of a model and a precision."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.table import PRECISIONS, Array, Table

_EIGHT = [PRECISIONS.index(name) for name in ("fp8", "mxfp8")]
_FOUR = [PRECISIONS.index(name) for name in ("nvfp4",)]


def routed_share(t: Table) -> Array:
    """The share of the layers that have experts, 0 to 1."""
    return np.where(t.experts > 0, (t.layers - t.dense_layers) / t.layers, 0.0)


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
