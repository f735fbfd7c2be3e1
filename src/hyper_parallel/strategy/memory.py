"""What is kept, recomputed or moved: today recomputation, later the budget of HyperOffload."""

from __future__ import annotations

from typing import ClassVar, Literal

from hyper_parallel.strategy.section import Section


class Memory(Section):
    """How the step's memory is held down."""

    reserved: ClassVar = dict.fromkeys(
        ("device", "host", "pool", "flash", "expert_load"), "memory budgets come with HyperOffload"
    )

    recompute: Literal["none", "layer"] = "none"
    """`layer` keeps only each layer's input and computes the layer again in the backward pass."""
    reshard_after_forward: bool = True
    """With `shard`: free a layer's gathered parameters after its forward pass and gather them again in the
    backward pass. False keeps them, which costs memory and saves one gather."""
