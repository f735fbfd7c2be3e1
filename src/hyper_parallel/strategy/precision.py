"""`precision` section: dtypes of parameters, computation and reductions, by module."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hyper_parallel.strategy.section import Section

Dtype = Literal["float32", "bfloat16"]


class Precision(Section):
    """Mixed precision: parameters and optimizer state are kept in `param`, arithmetic is done in `compute`."""

    param: Dtype = "float32"
    """The dtype in which parameters and optimizer state are kept."""
    compute: Dtype = "float32"
    """The dtype of a module's weights and activations during computation."""
    reduce: Dtype = "float32"
    """The dtype in which gradients are summed over the data axes."""
    modules: dict[str, Dtype] = Field(default_factory=dict)
    """Module pattern to compute dtype, for modules that need more precision, e.g. ``{"*norm*": float32}``.
    A pattern that matches no module is an error; where several match, the last one wins."""
