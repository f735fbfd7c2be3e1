"""Passes of generation: their read-volume bound, closed form and Trace, with weights, contexts and experts in tiers.

`shape_pass.of_shape` gives a `PassModel` from a model's dimensions; `estimate.generate_capture` gives it from its code.
"""

from hyper_parallel.simulator.generation.pass_model import (
    AttentionSizes,
    Layer,
    PassLoad,
    PassModel,
    PassOp,
    Piece,
)
from hyper_parallel.simulator.generation.tier_split import Footprint, TierSplit, footprint

__all__ = [
    "AttentionSizes",
    "Footprint",
    "Layer",
    "PassLoad",
    "PassModel",
    "PassOp",
    "Piece",
    "TierSplit",
    "footprint",
]
